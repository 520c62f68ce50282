/**
 * The panels of nodes inside a subgraph, shown on the subgraph's own node while that is in sight: the pictures of a dataset,
 * and the curve, the previews and Stop of a training. A panel is one element, which moves there and back. Files that are
 * dropped on the subgraph's own node, or beside a Dataset on the canvas, go to the Dataset.
 */
import { el, hasFiles } from './dom.js'
import { addPanel, api, app, everyNode, fit, holdersOf, resize, widen } from './editor.js'
import { forgetBox } from './problem_box.js'

const LEAST_WIDTH = 300
const ROOM = 12 // pixels that the classic canvas takes from a panel below multi-line fields
const DATA_FILES = /\.(json|safetensors|latent|glb|zip)$/i // which the editor opens itself
const panels = new WeakMap() // node inside: {content, home, spare, moved, drop}
const outside = new WeakMap() // subgraph's own node: {widget, holder}

/**
 * Offer a node's panel to the subgraphs around it: `spare()` says how many pixels of its height it could do without,
 * `moved()` is called when it has moved, `drop(event)` takes files.
 */
export function offer(node, content, { spare = () => 0, moved, drop }) {
  panels.set(node, { content, home: content.parentElement, spare, moved, drop })
  requestAnimationFrame(place)
}

/** The node that shows a node's panel now: itself, or the subgraph's own node. */
export const shownAt = (node) => holderInSight(node) ?? node

const holderInSight = (node) => holdersOf(node).find((one) => one.graph === app.canvas.graph)

/** Make the node that shows a panel as tall as it needs. */
export function fitShown(node) {
  const shown = shownAt(node)
  if (shown.graph) fit(shown)
}

/** Follow the graph and what is in sight of it. Once. */
export function listen() {
  api.addEventListener('graphChanged', place)
  app.canvas.canvas.addEventListener('litegraph:set-graph', () => requestAnimationFrame(place))
  document.addEventListener('dragover', (event) => nearest(event) && event.preventDefault())
  document.addEventListener('drop', dropBeside, true)
}

/** Put every panel to where a person can see it. */
export function place() {
  const used = new Set()
  everyNode((node) => {
    const panel = panels.get(node)
    if (!panel) return
    const holder = holderInSight(node)
    for (const one of holdersOf(node)) used.add(one)
    const target = holder ? holderOf(holder) : panel.home
    if (panel.content.parentElement === target) return
    target.append(panel.content)
    panel.moved?.()
    if (holder) fitShown(node)
  })
  everyNode((node) => outside.has(node) && !used.has(node) && takeBack(node))
}

/** The element of a subgraph's own node that panels are put into, made once. */
function holderOf(node) {
  if (!outside.has(node)) {
    const holder = el('div', { class: 'graft-outside-panels' })
    outside.set(node, { holder, widget: addPanel(node, 'outside', holder, () => spareOf(node, holder) - ROOM) })
    widen(node, LEAST_WIDTH)
    node.onDragOver = hasFiles
    node.onDragDrop = (event) =>
      Boolean(
        panelsOf(node)
          .find(({ drop }) => drop)
          ?.drop(event),
      )
  }
  return outside.get(node).holder
}

/** Nothing in the subgraph has a panel any more. */
function takeBack(node) {
  const { widget } = outside.get(node)
  outside.delete(node)
  forgetBox(node)
  node.removeWidget(widget)
  resize(node, [node.size[0], node.computeSize()[1]])
}

/** The panels of the nodes inside a subgraph. */
function panelsOf(node) {
  const found = []
  everyNode((one) => panels.has(one) && found.push(panels.get(one)), node.subgraph)
  return found
}

/** How many pixels the panels beside and below each other could do without: of each row as many as its tallest. */
function spareOf(node, holder) {
  const rows = new Map()
  for (const { content, spare } of panelsOf(node)) {
    if (content.parentElement !== holder) continue
    const row = rows.get(content.offsetTop) ?? []
    rows.set(content.offsetTop, [...row, spare()])
  }
  return [...rows.values()].reduce((sum, row) => sum + Math.min(...row), 0)
}

/** Take what is dropped on the canvas, beside nodes that take files themselves, for the Dataset that is nearest. */
function dropBeside(event) {
  const panel = nearest(event)
  if (!panel || !isForDataset(event)) return
  event.preventDefault()
  event.stopImmediatePropagation()
  panel.drop(event)
}

/** A folder, or more than one picture: a single file may be a workflow, which the editor opens. */
function isForDataset({ dataTransfer }) {
  const entries = [...dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean)
  if (entries.some((entry) => entry.isDirectory)) return true
  return entries.length > 1 && !entries.some(({ name }) => DATA_FILES.test(name))
}

/** The panel of the Dataset in sight that is nearest to files over the canvas, if none of its nodes takes them there. */
function nearest(event) {
  if (!hasFiles(event) || event.target !== app.canvas.canvas) return undefined
  const [x, y] = app.canvas.convertEventToCanvasOffset(event)
  if (app.canvas.graph.getNodeOnPos(x, y)?.onDragDrop) return undefined
  let found
  everyNode((node) => {
    const panel = panels.get(node)
    const shown = shownAt(node)
    if (!panel?.drop || shown.graph !== app.canvas.graph) return
    const far = Math.hypot(shown.pos[0] + shown.size[0] / 2 - x, shown.pos[1] + shown.size[1] / 2 - y)
    if (!found || far < found.far) found = { panel, far }
  })
  return found?.panel
}
