/**
 * What is wrong at a node, said in its panel: a setting that is refused before anything runs, or an error that ended
 * the run. It goes when the node is queued again.
 */
import { el } from './dom.js'
import { addPanel, api, app, everyNode, fit, nodeOf, resize, whenSized } from './editor.js'
import { boxOf, forgetBox } from './problem_box.js'

const ROOM = 12 // pixels that the classic canvas takes from a panel below multi-line fields
const LOOK_AGAIN = 250 // milliseconds between looks at whether a queued workflow was refused
const PATIENCE = 60_000

const lent = new WeakMap() // node without a panel of its own: {widget, height (of the node before)}

/** Say what is wrong at a node, a line each; nothing hides it. */
export function say(node, ...lines) {
  if (lines.length && isOurs(node) && !boxOf(node)) lend(node)
  const box = node && boxOf(node)
  if (!box) return
  const shown = box.textContent
  box.replaceChildren(...lines.map((line) => el('div', {}, line)))
  box.hidden = !lines.length
  if (!lines.length && lent.has(node)) takeBack(node)
  else if (box.textContent !== shown) requestAnimationFrame(() => node.graph && fit(node))
}

/** Give a node without a panel one, for as long as something is wrong with it. */
function lend(node) {
  const height = node.size[1]
  lent.set(node, { widget: addPanel(node, 'said', null, () => -ROOM), height })
  whenSized(boxOf(node), () => lent.has(node) && fit(node)) // once it is on the page
}

function takeBack(node) {
  const { widget, height } = lent.get(node)
  lent.delete(node)
  forgetBox(node)
  node.removeWidget(widget)
  resize(node, [node.size[0], height])
}

/** Follow the runs, once. */
export function listen() {
  api.addEventListener('execution_start', () => everyNode((node) => say(node)))
  api.addEventListener('execution_error', ({ detail }) =>
    say(nodeOf(detail.node_id), ...linesOf(detail.exception_message)),
  )
  api.addEventListener('promptQueueing', watch)
  api.addEventListener('promptQueued', sayRefusals) // front end 1.27: also of a workflow that was refused
}

const linesOf = (message) =>
  String(message ?? '')
    .split('\n')
    .filter((line) => line.trim())

let watched = null

/** A refused workflow makes no event in newer front ends: look for its errors until it is queued. */
function watch() {
  const before = app.lastNodeErrors
  const end = Date.now() + PATIENCE
  clearInterval(watched)
  watched = setInterval(() => {
    const refused = app.lastNodeErrors
    if (Date.now() > end) clearInterval(watched)
    if (refused && refused !== before) sayRefusals()
  }, LOOK_AGAIN)
}

/** Say the errors of the workflow that was queued last, at its nodes. */
function sayRefusals() {
  clearInterval(watched)
  everyNode((node) => say(node))
  for (const [id, { errors }] of Object.entries(app.lastNodeErrors ?? {})) {
    const node = nodeOf(id)
    const words = [...new Set(errors.flatMap(wordsOf))]
    say(node, ...words)
    if (isOurs(node)) unmark(node, errors, namedIn(node, words.join(' ')))
  }
}

const isOurs = (node) => node?.constructor.nodeData?.category?.startsWith('Graft')

/** The inputs of a node whose names are in a text (the host's, in English); of names that overlap the longest counts. */
function namedIn(node, text) {
  const { required, optional } = node.constructor.nodeData.input ?? {}
  const labels = Object.entries({ ...required, ...optional }).map(([id, declared]) => [
    declared[1]?.display_name ?? id,
    id,
  ])
  const named = new Set()
  for (const [label, id] of labels.sort(([one], [other]) => other.length - one.length)) {
    if (!text.includes(label)) continue
    named.add(id)
    text = text.replaceAll(label, ' ')
  }
  return named
}

/**
 * Take what the node itself refuses from the inputs that the words do not name: the host says it at every input that the
 * node checks, whichever is wrong. The first stays if they name none.
 */
function unmark(node, errors, named) {
  const own = errors.filter((error) => error.type === 'custom_validation_failed')
  const kept = own.filter((error) => named.has(error.extra_info?.input_name))
  for (const error of own) {
    if (error === own[0] && !kept.length) continue
    if (kept.includes(error)) continue
    errors.splice(errors.indexOf(error), 1)
    const slot = node.inputs?.find((one) => one.name === error.extra_info?.input_name)
    if (slot) slot.hasErrors = false
  }
}

/** The host's error at an input without the input's id in front: "folder - there is no folder …". */
function wordsOf({ details, message, extra_info: { input_name: name } = {} }) {
  const text = String(details || message)
  return linesOf(text.startsWith(`${name} - `) ? text.slice(name.length + 3) : text)
}
