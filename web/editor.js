/** The editor's public objects, and the few things that every widget of the pack needs from them. */
import { api } from '../../scripts/api.js'
import { app } from '../../scripts/app.js'
import { el } from './dom.js'
import { problemBox } from './problem_box.js'

export { api, app }

const MARGIN = 10 // below a DOM widget; the editor adds it when it draws, which would be a change of its own
const places = new WeakMap() // element of a widget: where its node is in the workflow
let changes = 0 // that are being made

/** Tell the editor that the graph changes, so that undo knows it: `change` runs between its two marks. */
export function changing(change) {
  app.canvas?.emitBeforeChange?.()
  changes += 1
  try {
    change()
  } finally {
    changes -= 1
    app.canvas?.emitAfterChange?.()
    app.canvas?.setDirty?.(true, true)
  }
}

/** Where a node is in the workflow: the same for the node that an undo puts in its place. */
export function placeOf(node) {
  const isInside = node.graph && node.graph !== (app.rootGraph ?? app.graph)
  return `${isInside ? node.graph.id : ''} ${node.id}`
}

/** Whether the editor loads what an undo or a redo brings back. */
export const isRestoring = () => Boolean(trackerOf()?._restoringState)

/** What keeps the steps of undo of the workflow that is open. */
export const trackerOf = () => app.extensionManager?.workflow?.activeWorkflow?.changeTracker

/** Have the editor note what has changed. */
function note(tracker) {
  if (tracker?.captureCanvasState) tracker.captureCanvasState()
  else tracker?.checkState?.() // its name before 1.49
}

/**
 * Have the editor note sizes of nodes that only follow a change of before, such as when the server has answered: they belong
 * to the last step of undo, or to the one that a person is making, and end no redo.
 */
function noteSizes() {
  const tracker = trackerOf()
  if (!tracker?.activeState || changes) return
  const { graphEqual } = tracker.constructor
  const now = JSON.parse(JSON.stringify((app.rootGraph ?? app.graph).serialize()))
  if (!graphEqual(withoutSizes(tracker.activeState), withoutSizes(now))) return
  const lists = [tracker.undoQueue, tracker.redoQueue].map((list) => [list, [...list]])
  note(tracker)
  for (const [list, before] of lists) list.splice(0, list.length, ...before)
}

/** A saved workflow without the sizes of its nodes. */
function withoutSizes(workflow) {
  const isSize = (holder, key) => key === 'size' && 'pos' in holder
  const keep = function (key, value) {
    return isSize(this, key) ? undefined : value
  }
  return JSON.parse(JSON.stringify(workflow, keep))
}

let isPressed = false // a person may be dragging a node's corner
for (const name of ['pointerdown', 'pointerup', 'pointercancel']) {
  document.addEventListener(name, () => (isPressed = name === 'pointerdown'), true)
}

/** Nodes 2.0 measures a node some frames after what it shows has grown, on a busy page long after. */
function noteMeasured(element) {
  whenSized(element, () => {
    if (!window.LiteGraph?.vueNodesMode || isPressed) return
    requestAnimationFrame(() => requestAnimationFrame(noteSizes))
  })
}

/** The JSON that a route of the pack answers; an Error with the server's own words (`words`) when it refuses. */
export async function asked(route, options) {
  const response = await api.fetchApi(route, options)
  const body = await response.text()
  if (!response.ok) {
    let said = body
    try {
      const parsed = JSON.parse(body)
      said = parsed.error?.message ?? parsed.error ?? body
    } catch {
      // not JSON: the text itself is what the server said
    }
    const words = String(said || response.statusText)
    throw Object.assign(new Error(`${words} (${response.status})`), { words })
  }
  return JSON.parse(body)
}

/** The JSON that a route of the pack answers to a value, which is sent as JSON: it takes nothing else. */
export const posted = (route, value) =>
  asked(route, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(value) })

/** What an error says, without the number of the server's answer. */
export const wordsOf = (error) => error.words ?? error.message

/**
 * The nodes that an execution id such as "7" or "12:3" (node 3 inside subgraph node 12) leads through, the last the one that
 * it names; none if that is not there.
 */
export function pathOf(executionId) {
  let graph = app.rootGraph ?? app.graph
  const path = []
  for (const part of String(executionId).split(':')) {
    const node = graph?.getNodeById?.(part) ?? graph?.getNodeById?.(Number(part))
    if (!node) return []
    path.push(node)
    graph = node.subgraph
  }
  return path
}

/** The node that an execution id names, or undefined. */
export const nodeOf = (executionId) => pathOf(executionId).at(-1)

/** The subgraphs' own nodes that a node is inside of. */
export function holdersOf(node) {
  const found = []
  everyNode((one) => one.subgraph && one.subgraph === node.graph && found.push(one, ...holdersOf(one)))
  return found
}

/** Call `act` with every node of the graph, also inside subgraphs. */
export function everyNode(act, graph = app.rootGraph ?? app.graph) {
  for (const node of graph?.nodes ?? []) {
    act(node)
    if (node.subgraph) everyNode(act, node.subgraph)
  }
}

/** The height of an element, or 0 while the editor has not given it a width yet. */
export const heightOf = (content) => (content.offsetWidth > 100 ? content.offsetHeight : 0)

/** How much room the content of a panel needs, less what it could spare; two lines as long as it is not laid out. */
export const roomOf = (content, spare = 0) => Math.max(24, heightOf(content) - spare || 36) + 4

/** Call `act` when an element comes onto the page, and whenever its width changes there. */
export function whenWide(element, act) {
  let before = 0
  new ResizeObserver(() => {
    const width = element.clientWidth
    if (width && width !== before) act()
    before = width
  }).observe(element)
}

/** Call `act` when an element comes onto the page, and whenever its size changes there. */
export function whenSized(element, act) {
  let before = ''
  new ResizeObserver(() => {
    const now = `${element.clientWidth} ${element.clientHeight}`
    if (element.clientWidth && now !== before) act()
    before = now
  }).observe(element)
}

/**
 * Keep a value in the workflow as a node's property, and at once in what the editor opens after a reload of the page: it
 * would look for changes only when someone touches the graph.
 */
export function remember(node, name, value) {
  if (JSON.stringify(node.properties[name]) === JSON.stringify(value)) return
  node.properties[name] = value
  note(trackerOf())
}

/**
 * Add a widget that is drawn by an element of the page. An undo makes all nodes anew; front end 1.58 (Nodes 2.0) keeps the
 * element of the node before on the page then, so that the new one takes its place.
 */
export function addElement(node, name, type, element, options) {
  // the editor's side panel would draw it there, in the panel's width
  const widget = node.addDOMWidget(name, type, element, { hideOnZoom: false, hideInPanel: true, ...options })
  if (!widget.visibility) keepOutOfSubgraphPanel(widget)
  noteMeasured(element)
  const settle = () => {
    if (!node.graph) return
    const place = [(app.rootGraph ?? app.graph).id, node.graph.id, node.id, name].join(' ')
    const before = [...document.querySelectorAll('.graft')].find((one) => places.get(one) === place)
    places.set(element, place)
    if (!element.isConnected) before?.replaceWith(element)
  }
  chain(node, 'onAdded', () => requestAnimationFrame(settle)) // the editor has drawn it by then, if it does
  return widget
}

/**
 * Front end 1.49 asks `hideInPanel` where a node is selected, and not where a subgraph is: there it leaves out what the
 * canvas alone draws and what a link gives. Each of them would hide the widget where the other is asked.
 */
function keepOutOfSubgraphPanel(widget) {
  const isModern = () => Boolean(window.LiteGraph?.vueNodesMode)
  Object.defineProperty(widget.options, 'canvasOnly', { get: () => !isModern(), enumerable: false, configurable: true })
  let isLinked = false
  Object.defineProperty(widget, 'computedDisabled', {
    get: () => isModern() || isLinked,
    set: (is) => {
      isLinked = is
    },
    configurable: true,
  })
}

/**
 * Add a panel as tall as its content, or taller: `spare()` says how many pixels of that it could do without. It holds no
 * value: it is not saved in the workflow and not sent in the prompt.
 */
export function addPanel(node, name, content, spare = () => 0) {
  const all = el('div', { class: 'graft-content' }, problemBox(node), content)
  const element = el('div', { class: `graft graft-panel graft-${name}` }, all)
  const widget = addElement(node, name, `graft_${name}`, element, {
    serialize: false,
    getMinHeight: () => roomOf(all, spare()),
    getValue: () => '',
    setValue: () => {},
  })
  widget.serialize = false
  return widget
}

/** Make a new node at least so wide. */
export function widen(node, width) {
  if (node.size[0] < width) node.setSize([width, node.size[1]])
}

/**
 * Make a node as tall as its widgets need, keeping the width; never smaller than the user made it unless `shrink`. It is no
 * step of undo of its own.
 */
export function fit(node, shrink = false) {
  const [width, needed] = node.computeSize()
  const height = needed + MARGIN
  const size = [Math.max(node.size[0], width), shrink ? height : Math.max(node.size[1], height)]
  resize(node, size)
}

/** Give a node a size, which is not a step of undo of its own. */
export function resize(node, size) {
  if (size[0] !== node.size[0] || size[1] !== node.size[1]) {
    node.setSize(size)
    noteSizes()
  }
  app.canvas?.setDirty?.(true, true)
}

/** Call `before` and what was there, in a node's method. */
export function chain(node, method, added) {
  const before = node[method]
  node[method] = function (...args) {
    const result = before?.apply(this, args)
    added.apply(this, args)
    return result
  }
}
