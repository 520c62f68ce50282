/** Edits one caption in place, in its own file; keeps what it replaced, so that it can be undone. */
import { el } from './dom.js'
import { asked, wordsOf } from './editor.js'
import { t } from './texts.js'

const ROUTE = '/graft/dataset/caption'
const MOST_UNDONE = 100

/** The changes of captions that can be undone, the last one at the end. */
export class CaptionHistory {
  constructor() {
    this.changes = []
  }

  get last() {
    return this.changes.at(-1)
  }

  /** Write the caption of a picture; `place` is {folder, name, captions, encoding}. */
  async write(place, text, version) {
    const wrote = await post(place, text, version)
    this.changes = [...this.changes, { place, before: wrote.before, version: wrote.version }].slice(-MOST_UNDONE)
  }

  /** Put the caption back that the last change replaced; returns its place. */
  async undo() {
    const { place, before, version } = this.last
    await post(place, before, version)
    this.changes.pop()
    return place
  }
}

const post = (place, text, version) =>
  asked(ROUTE, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ ...place, text, version }),
  })

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
