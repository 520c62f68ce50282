/**
 * The graph that the editor opens with when nobody has left one there. ComfyUI's own has nodes that the embedded host does
 * not have, and models that nobody has put there; there Graft's first template takes its place.
 */
import { asked } from './editor.js'

const FIRST = 'Train your first LoRA'

/** Put the first template in the place of ComfyUI's default graph, on the embedded host's server. */
export async function replaceDefaultGraph() {
  const graph = window.comfyAPI?.defaultGraph?.defaultGraph // none where a front end has it elsewhere
  const { system } = await asked('/system_stats')
  if (!graph || system.deploy_environment !== 'comfyui_api_stubs') return
  const [, pack] = new URL(import.meta.url).pathname.match(/extensions\/([^/]+)\//)
  const template = await asked(`/workflow_templates/${pack}/${encodeURIComponent(FIRST)}.json`)
  for (const key of Object.keys(graph)) delete graph[key]
  Object.assign(graph, template)
}
