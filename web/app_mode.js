/**
 * App mode shows no nodes, and so no panels: pictures only. While a step trains, its curve goes there as the picture of what
 * runs, as a sampler's latent preview does.
 */
import { el } from './dom.js'
import { api, app } from './editor.js'

const [WIDTH, HEIGHT] = [960, 540]
const PAUSE = 1000 // milliseconds between two pictures
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

/** Give what is drawn the background that a panel has: its colors are chosen for that. */
function fillBehind(canvas, color) {
  const pen = canvas.getContext('2d')
  pen.resetTransform()
  pen.globalCompositeOperation = 'destination-over'
  pen.fillStyle = color
  pen.fillRect(0, 0, canvas.width, canvas.height)
}
