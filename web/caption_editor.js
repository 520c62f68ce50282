/** Edits one caption in place, in its own file; keeps what it replaced, so that it can be undone. */
import { el } from './dom.js'
import { asked, posted, wordsOf } from './editor.js'
import { t } from './texts.js'

const ROUTE = '/graft/dataset/caption'
const MOST_UNDONE = 100

/**
 * The changes of captions by hand at a node, and how many of them hold now: those after are undone. `mark` names the last
 * one that holds; the workflow keeps it, so that a change of a caption is a step of undo like any other.
 */
export class CaptionHistory {
  constructor() {
    this.changes = []
    this.at = 0
    this.turn = Promise.resolve() // one change after the other
  }

  get last() {
    return this.changes[this.at - 1]
  }

  get mark() {
    return this.last?.mark ?? ''
  }

  /** Write the caption of a picture; `place` is {folder, name, captions, encoding}. */
  async write(place, text, version) {
    const wrote = await post(place, text, version)
    const mark = `${Date.now()}.${this.changes.length}`
    const change = { mark, place, text, before: wrote.before, version: wrote.version }
    this.changes = [...this.changes.slice(0, this.at), change].slice(-MOST_UNDONE)
    this.at = this.changes.length
  }

  /** Put the caption back that the last change replaced; returns its place. */
  async undo() {
    const { last } = this
    last.version = (await post(last.place, last.before, last.version)).version
    this.at -= 1
    return last.place
  }

  async redo() {
    const next = this.changes[this.at]
    next.version = (await post(next.place, next.text, next.version)).version
    this.at += 1
  }

  /** Undo or redo changes until this one is the last that holds; whether captions were written. */
  moveTo(mark) {
    const move = async () => {
      const to = mark ? this.changes.findIndex((change) => change.mark === mark) + 1 : 0
      if (to === this.at || (mark && !to)) return false
      while (this.at > to) await this.undo()
      while (this.at < to) await this.redo()
      return true
    }
    this.turn = this.turn.then(move, move)
    return this.turn
  }
}

const histories = new WeakMap() // what keeps a workflow's steps of undo -> Map of place -> CaptionHistory

/** The history of the node at a place of a workflow: an undo makes the node anew. */
export function historyAt(tracker, place) {
  if (!histories.has(tracker)) histories.set(tracker, new Map())
  const places = histories.get(tracker)
  if (!places.has(place)) places.set(place, new CaptionHistory())
  return places.get(place)
}

/** Forget the history at a place of a workflow, as another node has come there. */
export function forgetHistory(tracker, place) {
  histories.get(tracker)?.delete(place)
}

const post = (place, text, version) => posted(ROUTE, { ...place, text, version })

/**
 * Open a field for a picture's caption at the end of an element. `done(saved)` is called when it closes; until then the
 * text stays in the field, whatever the server says.
 */
export async function editCaption(place, holder, history, done) {
  const read = await asked(`${ROUTE}?${new URLSearchParams(place)}`)
  const field = el('textarea', {
    class: 'graft-raw',
    rows: 4,
    'aria-label': t('Caption of {name}', { name: place.name }),
    value: read.text ?? '',
  })
  const problem = el('div', { class: 'graft-problem', role: 'alert', hidden: true })
  const shut = (saved) => {
    editor.remove()
    done(saved)
  }
  const save = async () => {
    saver.disabled = true
    try {
      await history.write(place, field.value, read.version)
      shut(true)
    } catch (error) {
      problem.textContent = t('Not saved: {error}', { error: wordsOf(error) })
      problem.hidden = false
      saver.disabled = false
    }
  }
  const saver = el('button', { class: 'graft-button', type: 'button', onclick: save }, t('Save'))
  const cancel = el('button', { class: 'graft-button', type: 'button', onclick: () => shut(false) }, t('Cancel'))
  const editor = el(
    'div',
    { class: 'graft-editor' },
    el('div', { class: 'graft-dim' }, read.text === null ? t('{file}, a new file', read) : read.file),
    field,
    problem,
    el('div', { class: 'graft-foot' }, saver, cancel, el('span', { class: 'graft-dim' }, t('Ctrl+Enter saves'))),
  )
  editor.addEventListener('keydown', (event) => {
    event.stopPropagation() // the graph must not act on it
    if (event.key === 'Escape') shut(false)
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) save()
  })
  for (const name of ['pointerdown', 'wheel', 'paste', 'copy', 'cut']) {
    editor.addEventListener(name, (event) => event.stopPropagation())
  }
  holder.append(editor)
  field.focus()
}
