/**
 * What is wrong at a node, said in its own panel: a setting that is refused before anything runs, or an error that ended
 * the run. It goes when the node is queued again.
 */
import { el } from './dom.js'
import { api, app, everyNode, fit, nodeOf } from './editor.js'
import { boxOf } from './problem_box.js'

const LOOK_AGAIN = 250 // milliseconds between looks at whether a queued workflow was refused
const PATIENCE = 60_000

/** Say what is wrong at a node, a line each; nothing hides it. */
export function say(node, ...lines) {
  const box = node && boxOf(node)
  if (!box) return
  const shown = box.textContent
  box.replaceChildren(...lines.map((line) => el('div', {}, line)))
  box.hidden = !lines.length
  if (box.textContent !== shown) requestAnimationFrame(() => node.graph && fit(node))
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
    say(nodeOf(id), ...new Set(errors.flatMap(wordsOf)))
  }
}

/** The host's error at an input without the input's id in front: "folder - there is no folder …". */
function wordsOf({ details, message, extra_info: { input_name: name } = {} }) {
  const text = String(details || message)
  return linesOf(text.startsWith(`${name} - `) ? text.slice(name.length + 3) : text)
}
