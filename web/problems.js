/**
 * What is wrong at a node, said in its panel: a setting that is refused before anything runs, or an error that ended
 * the run. The subgraphs around it say it too, with the node's title; where no graph is in sight (app mode), the page does.
 * It goes when the node is queued again.
 */
import * as appMode from './app_mode.js'
import { el } from './dom.js'
import { addPanel, api, app, everyNode, fit, holdersOf, pathOf, resize, whenSized } from './editor.js'
import { boxOf, forgetBox } from './problem_box.js'

const ROOM = 12 // pixels that the classic canvas takes from a panel below multi-line fields
const LOOK_AGAIN = 250 // milliseconds between looks at whether a queued workflow was refused
const PATIENCE = 60_000

const told = new WeakMap() // node: what its box says, [{about (a node), lines}]
const lent = new WeakMap() // node without a panel of its own: {widget, height (of the node before)}

/** Say what is wrong at a node of the pack, a line each; no line takes it back. */
export function say(node, lines, around = holdersOf(node)) {
  if (!isOurs(node)) return
  for (const one of [node, ...around]) tell(one, node, lines)
  appMode.announce(node, 'problem', lines)
}

/** Have a node's box say lines about a node, in place of what it said of it. */
function tell(node, about, lines) {
  const before = told.get(node) ?? []
  const others = before.filter((one) => one.about !== about)
  if (!lines.length && others.length === before.length) return
  told.set(node, lines.length ? [...others, { about, lines }] : others)
  draw(node)
}

function draw(node) {
  const all = told.get(node)
  if (all.length && !boxOf(node)) lend(node)
  const box = boxOf(node)
  if (!box) return
  const shown = box.textContent
  box.replaceChildren(...all.flatMap(({ about, lines }) => linesAt(node, about, lines)))
  box.hidden = !all.length
  const isEmpty = () => lent.has(node) && !told.get(node).length
  if (isEmpty()) {
    requestAnimationFrame(() => isEmpty() && takeBack(node))
  } // what follows at once uses it again
  else if (box.textContent !== shown) requestAnimationFrame(() => node.graph && fit(node))
}

/** Lines about a node as another says them: with its title, unless they begin with it. */
function linesAt(node, about, [first, ...more]) {
  const title = `${about.title}: `
  const isNamed = node === about || first.startsWith(title)
  return [isNamed ? first : `${title}${first}`, ...more].map((line) => el('div', {}, line))
}

/** Say nothing any more: a run begins. */
function forgetAll() {
  everyNode((node) => {
    if (!told.get(node)?.length) return
    told.set(node, [])
    draw(node)
  })
  appMode.hush()
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
  noteRefusedParts()
  api.addEventListener('execution_start', ({ detail }) => {
    running = detail.prompt_id
    if (detail.prompt_id !== refusedInPart) forgetAll()
  })
  api.addEventListener('graft.notice', ({ detail }) => {
    if (detail.prompt === running) sayAt(detail.node, linesOf(detail.text))
  })
  api.addEventListener('execution_error', ({ detail }) => sayAt(detail.node_id, linesOf(detail.exception_message)))
  api.addEventListener('promptQueueing', watch)
  api.addEventListener('promptQueued', sayRefusals) // front end 1.27: also of a workflow that was refused
}

let running = null // the id of the run that this page has begun; notices of others reach it too
let refusedInPart = null // the id of a run that begins without the nodes that were refused: their words stay

/** Note which run ComfyUI begins though it refuses some of its nodes. */
function noteRefusedParts() {
  const queuePrompt = api.queuePrompt
  api.queuePrompt = async function (...given) {
    const answer = await queuePrompt.apply(this, given)
    if (Object.keys(answer?.node_errors ?? {}).length) refusedInPart = answer.prompt_id
    return answer
  }
}

/** Say what is wrong at the node that an execution id names. */
function sayAt(id, lines) {
  const path = pathOf(id)
  const node = path.pop()
  if (node) say(node, lines, path)
  return node
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
  forgetAll()
  for (const [id, { errors }] of Object.entries(app.lastNodeErrors ?? {})) {
    const words = [...new Set(errors.flatMap(wordsOf))]
    const node = sayAt(id, words)
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
