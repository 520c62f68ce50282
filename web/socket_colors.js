/** Colors of the sockets and wires of Graft's types. A palette that names a type itself wins. */
import { el } from './dom.js'
import { app } from './editor.js'

const COLORS = {
  GRAFT_DATASET: '#a1887f',
  GRAFT_PREVIEWS: '#26a69a',
  GRAFT_SETTINGS: '#9ccc65',
  GRAFT_SNAPSHOTS: '#7986cb',
  LORA_MODEL: '#ba68c8',
  LORA_STACK: '#ec407a',
  LOSS_MAP: '#90a4ae',
  TRAIN_STATE: '#26c6da',
}

/** Give the types their colors, again whenever the editor has loaded a palette: it forgets the ones that it lacks. */
export function colorSockets() {
  const names = Object.entries(COLORS).map(([type, value]) => `--color-datatype-${type}: ${value};`)
  document.head.append(el('style', { textContent: `:root { ${names.join(' ')} }` })) // for Nodes 2.0
  color()
  new MutationObserver(color).observe(document.documentElement, {
    attributes: true,
    attributeFilter: ['style', 'class'],
  })
}

function color() {
  for (const map of [window.LGraphCanvas?.link_type_colors, app.canvas?.default_connection_color_byType]) {
    if (map) for (const [type, value] of Object.entries(COLORS)) map[type] ||= value
  }
}
