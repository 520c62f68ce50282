/** Advanced settings that a workflow has set stay in sight: the editor folds only those that are as on a new node. */
import { chain } from './editor.js'

/** Unfold the advanced settings of a node that is loaded with some set, unless the workflow says how it was left. */
export function showWhatIsSet(node) {
  chain(node, 'onConfigure', (saved) => {
    if (saved.showAdvanced === undefined && node.widgets?.some((widget) => isSet(node, widget)))
      node.showAdvanced = true
  })
}

/** Whether a widget is advanced and differs from what a new node has. */
function isSet(node, widget) {
  const [kind, options] = declared(node, widget.name) ?? []
  if (!options?.advanced) return false
  const first = Array.isArray(kind) ? kind[0] : options.options?.[0]
  return widget.value !== (options.default ?? first)
}

/** What the host says of an input: [type or choices, options]; undefined for none of the node's own. */
function declared(node, name) {
  const { required, optional } = node.constructor.nodeData?.input ?? {}
  return required?.[name] ?? optional?.[name]
}
