/**
 * App mode shows no nodes, and so no panels: pictures only. While a step trains, its curve goes there as the picture of what
 * runs, as a sampler's latent preview does. What a node says of a problem or of how its run ended is a message of the page.
 */
import { el } from './dom.js'
import { api, app } from './editor.js'

const [WIDTH, HEIGHT] = [960, 540]
const PAUSE = 1000 // milliseconds between two pictures
const LIFE = 15_000 // milliseconds that a message without anything to do is shown
let job = null // the id of the workflow that runs
let last = -PAUSE

/** Listen for what runs, once. */
export function listen() {
  api.addEventListener('execution_start', ({ detail }) => {
    job = detail.prompt_id
  })
}

const isGraphHidden = () => app.canvas?.canvas?.checkVisibility?.() === false

/** Show what `paint(canvas, width, height)` draws, where no graph is in sight. */
export function showCurve(paint) {
  if (!job || !isGraphHidden() || performance.now() < last + PAUSE) return
  last = performance.now()
  const canvas = el('canvas', { class: 'graft-chart' })
  const holder = el('div', { class: 'graft graft-beside', 'aria-hidden': 'true' }, canvas)
  document.body.append(holder) // a chart takes its colors from the page
  paint(canvas, WIDTH, HEIGHT)
  fillBehind(canvas, getComputedStyle(holder).backgroundColor)
  // No node has this id: a node's own would keep the picture below its panel when the graph is back.
  const place = { nodeId: 'graft', displayNodeId: 'graft', parentNodeId: 'graft', realNodeId: 'graft' }
  canvas.toBlob((blob) => api.dispatchCustomEvent('b_preview_with_metadata', { ...place, blob, jobId: job }))
  holder.remove()
}

const messages = new Map() // node: {kind: what takes the page's message back}

/** Say what a node says, where no graph is in sight; no line takes it back. */
export function announce(node, kind, lines) {
  const mine = messages.get(node) ?? {}
  mine[kind]?.()
  delete mine[kind]
  if (!lines.length || !isGraphHidden()) return
  const life = kind === 'placed' ? LIFE : undefined
  mine[kind] = showMessage(kind === 'problem' ? 'error' : 'info', node.title, lines.join('\n'), life)
  messages.set(node, mine)
}

/** Show a message of the page, until its end or for `life` milliseconds; returns what takes it back. */
function showMessage(severity, title, text, life) {
  const { toast } = app.extensionManager
  if (toast.dismiss) {
    const id = toast[severity](title, { description: text, duration: life })
    return () => toast.dismiss(id)
  }
  const message = { severity, summary: title, detail: text, life } // its form before 1.58
  toast.add(message)
  return () => toast.remove(message)
}

/** Take all of these messages back. */
export function hush() {
  for (const [node, mine] of messages) for (const kind of Object.keys(mine)) announce(node, kind, [])
  messages.clear()
}

/** Give what is drawn the background that a panel has: its colors are chosen for that. */
function fillBehind(canvas, color) {
  const pen = canvas.getContext('2d')
  pen.resetTransform()
  pen.globalCompositeOperation = 'destination-over'
  pen.fillStyle = color
  pen.fillRect(0, 0, canvas.width, canvas.height)
}
