/** The widget of the input `rows` of LoRA Stack and Load LoRAs: add, order, switch and weigh LoRAs. Its value is JSON. */
import { addElement, api, changing, fit, heightOf } from './editor.js'
import { copy } from './clipboard.js'
import { el } from './dom.js'
import { wordsOf } from './lora_about.js'
import { bring, dropFiles } from './lora_drop.js'
import * as files from './lora_files.js'
import { drawRow } from './lora_row.js'
import { close, pick } from './picker.js'
import { closePopup } from './popup.js'
import { problemBox } from './problem_box.js'
import { openMenu, rowEntries } from './row_menu.js'
import { openPresets } from './row_presets.js'
import { moved, parse, plain, row as newRow, write } from './rows.js'
import { t } from './texts.js'

export const TYPE = 'GRAFT_LORA_ROWS'
const panels = new Set()

/** Draw the rows of a node; returns {widget} as the editor's widget makers do. */
export function loraRows(node, name, data) {
  const panel = new Rows(node, data?.[1]?.default ?? '')
  const widget = addElement(node, name, TYPE, panel.element, {
    getValue: () => panel.text,
    setValue: (text) => panel.read(text),
    getMinHeight: () => panel.height(),
    socketless: true,
  })
  panel.widget = widget
  panels.add(panel)
  const removed = widget.onRemove
  widget.onRemove = function () {
    removed?.call(this)
    panels.delete(panel)
    close()
    closePopup()
  }
  return { widget, minWidth: 440, minHeight: 120 }
}

/** Look at the files again, in every stack that is on the screen. */
export async function refresh() {
  files.forget()
  await Promise.all([...panels].map((panel) => panel.check()))
}

class Rows {
  constructor(node, text) {
    this.node = node
    this.rows = []
    this.unfolded = new Set() // of row objects
    this.informed = new Set()
    this.wrong = new Map() // row -> {near: names, if its file is missing; problems: texts}
    this.before = null // the rows that were on before a solo
    this.heads = el(
      'div',
      { class: 'graft-heads graft-dim', 'aria-hidden': 'true' },
      el('span', {}, t('File')),
      el('span', { class: 'graft-head' }, t('Model')),
      el('span', { class: 'graft-head' }, 'CLIP'),
      el('span', { class: 'graft-head-end' }),
    )
    this.list = el('div', { class: 'graft-rows', role: 'list', 'aria-label': t('LoRAs of the stack') })
    this.problem = el('div', { class: 'graft-problem', role: 'alert', hidden: true })
    this.message = el('div', { class: 'graft-message', role: 'status', hidden: true })
    this.raw = el('textarea', {
      class: 'graft-raw',
      'aria-label': t('Rows as JSON'),
      hidden: true,
      spellcheck: false,
      onchange: () => this.edited(() => this.read(this.raw.value)),
    })
    this.adder = el(
      'button',
      { class: 'graft-button graft-add', type: 'button', onclick: () => this.choose(null) },
      t('+ Add LoRA'),
    )
    this.all = el(
      'button',
      { class: 'graft-button', type: 'button', title: t('Switch all rows on or off'), onclick: () => this.switchAll() },
      t('All on/off'),
    )
    this.presets = el(
      'button',
      {
        class: 'graft-button',
        type: 'button',
        title: t('Save these rows, or take saved ones'),
        onclick: () => this.openPresets(),
      },
      t('Presets'),
    )
    this.content = el(
      'div',
      { class: 'graft-content' },
      problemBox(node),
      this.problem,
      this.message,
      this.raw,
      this.heads,
      this.list,
      el('div', { class: 'graft-foot' }, this.adder, this.all, this.presets),
    )
    this.element = el('div', { class: 'graft graft-stack' }, this.content)
    // The graph must not act on keys and wheels that are meant for the list.
    this.element.addEventListener('keydown', (event) => {
      if (!(event.ctrlKey || event.metaKey) || ['INPUT', 'TEXTAREA'].includes(event.target.tagName)) {
        event.stopPropagation()
      }
    })
    this.element.addEventListener(
      'wheel',
      (event) => document.activeElement?.type === 'number' && event.stopPropagation(),
    )
    dropFiles(node, this.element, (dropped) => this.take(dropped))
    this.read(text)
  }

  /** The height the rows need; the minimum until they are laid out, so that a loaded node keeps its saved size. */
  height() {
    return Math.max(90, heightOf(this.content)) + 4
  }

  /** Take the value that the graph gives: a saved workflow, an undo, a paste. */
  read(text) {
    this.text = String(text ?? '')
    try {
      this.rows = parse(this.text)
      this.problem.hidden = this.raw.hidden = true
      this.list.hidden = this.adder.hidden = this.all.hidden = this.presets.hidden = false
    } catch (error) {
      this.rows = []
      this.raw.value = this.text
      this.problem.textContent = t('These rows cannot be read: {error}', { error: error.message })
      this.problem.hidden = this.raw.hidden = false
      this.list.hidden = this.adder.hidden = this.all.hidden = this.presets.hidden = true
      requestAnimationFrame(() => this.refit()) // the text needs more room than the node was saved with
    }
    this.unfolded.clear()
    this.informed.clear()
    this.draw()
    this.check()
  }

  /** Change the rows by hand: one step of undo, one call of the widget's callback. */
  edited(change) {
    changing(() => {
      change()
      this.say('')
      if (this.raw.hidden) this.text = write(this.rows)
      this.widget?.callback?.(this.text)
    })
  }

  /** A change that shows only in the row's own fields: nothing is drawn anew, so the field keeps the focus. */
  set(row, name, value) {
    if (row[name] === value) return
    this.edited(() => (row[name] = value))
    if (['blocks', 'schedule'].includes(name)) this.check()
  }

  /** A change of the list: drawn anew; `focus` finds what has the focus afterwards. */
  restructure(change, focus) {
    this.edited(() => {
      change()
      this.draw()
      this.refit()
    })
    this.check()
    focus?.()
  }

  /** Flag the rows that are on and would be refused: a file that is not there, block weights, a schedule. */
  async check() {
    const turn = (this.turn = (this.turn ?? 0) + 1)
    const wrong = new Map()
    try {
      const known = await files.known()
      const used = this.rows.filter((row) => row.on)
      const look = async (row) => {
        const found = await looked(row, known)
        if (found.near || found.problems.length) wrong.set(row, found)
      }
      await Promise.all(used.map(look))
    } catch (error) {
      this.adder.title = t('The list of LoRAs cannot be read: {error}', { error: error.message })
      return
    }
    if (turn !== this.turn) return // the rows changed meanwhile, and are looked at again
    this.adder.title = ''
    if (this.raw.hidden && !this.problem.hidden) {
      this.problem.hidden = true // the list could not be read before
      this.refit()
    }
    this.wrong = wrong
    for (const [index, row] of this.rows.entries()) this.flag(this.list.children[index], row)
  }

  flag(element, row) {
    if (!element) return
    const { near, problems = [] } = this.wrong.get(row) ?? {}
    const hidden = near === undefined && !problems.length
    element.classList.toggle('graft-missing', !hidden)
    const note = element.querySelector('.graft-note')
    const shown = note.textContent
    note.hidden = hidden
    note.replaceChildren(...(near ? this.offers(row, near) : []), ...problems.map((text) => el('div', {}, text)))
    if (note.textContent !== shown) this.refit()
  }

  /** What to do about a file that is not there. */
  offers(row, near) {
    const links = near.flatMap((name, index) => [index ? t(' or ') : '', this.replacement(row, name)])
    return [
      `${t('There is no file “{file}” in the loras folders.', { file: row.file })} `,
      ...(near.length ? [t('Use '), ...links, t('?')] : [t('Copy it there and press R, or choose another file.')]),
    ]
  }

  replacement(row, name) {
    return el(
      'button',
      {
        class: 'graft-link',
        type: 'button',
        onclick: () =>
          this.restructure(
            () => (row.file = name),
            () => this.focus(row, '.graft-file'),
          ),
      },
      name,
    )
  }

  /** Open the list of files: for a row, or for a new one; `query` is what it begins to search for. */
  async choose(row, anchor = this.adder, query = '') {
    let known
    try {
      known = await files.names()
    } catch (error) {
      this.adder.title = t('The list of LoRAs cannot be read: {error}', { error: error.message })
      this.problem.textContent = this.adder.title
      this.problem.hidden = false
      this.refit()
      return
    }
    this.problem.hidden = true
    const words = { title: t('Choose a LoRA'), search: t('Search LoRAs'), none: t('no such LoRA'), query }
    const take = (name) => {
      const target = row ?? newRow(name)
      this.restructure(
        () => {
          target.file = name
          if (!row) this.rows.push(target)
        },
        () => this.focus(target, '.graft-model'),
      )
    }
    pick(anchor, known, row?.file, take, words)
  }

  switchAll() {
    const on = !this.rows.every((row) => row.on)
    this.restructure(
      () => this.rows.forEach((row) => (row.on = on)),
      () => this.all.focus(),
    )
  }

  /** Switch all rows but one off, or those on again that were on before. */
  solo(row) {
    const before = this.isSolo(row) ? (this.before ?? this.rows) : null
    const on = this.rows.filter((other) => other.on)
    this.restructure(
      () => this.rows.forEach((other) => (other.on = other === row || (before?.includes(other) ?? false))),
      () => this.focus(row, '.graft-on'),
    )
    this.before = before ? null : on
  }

  isSolo(row) {
    return row.on && this.rows.length > 1 && this.rows.every((other) => other === row || !other.on)
  }

  duplicate(row) {
    const copied = { ...row }
    this.restructure(
      () => this.rows.splice(this.rows.indexOf(row) + 1, 0, copied),
      () => this.focus(copied, '.graft-model'),
    )
  }

  /** Fold a part of a row in or out: `opened` has the rows where it is out, `selector` finds its button. */
  unfold(opened, row, selector) {
    if (!opened.delete(row)) opened.add(row)
    this.draw()
    this.refit()
    this.check()
    this.focus(row, selector)
  }

  openMenu(row, point) {
    const where = t('row {number}, {file}', { number: this.rows.indexOf(row) + 1, file: row.file })
    openMenu(point, where, rowEntries(this, row))
  }

  async copyWords(row) {
    try {
      const words = wordsOf(await files.info(row.file)).join(', ')
      if (!words) this.say(t('“{file}” names no trigger words.', { file: row.file }))
      else if (await copy(words)) this.say(t('Copied: {words}', { words }))
      else this.say(t('The browser does not let this page copy'), true)
    } catch (error) {
      this.say(t('No file info: {error}', { error: error.message }), true)
    }
  }

  openPresets() {
    const take = (rows, added) =>
      this.restructure(
        () => (this.rows = added ? [...this.rows, ...rows] : rows),
        () => this.presets.focus(),
      )
    openPresets(this.presets, () => this.rows, take)
  }

  /** Add dropped files as rows; what is wrong with one does not keep the others out. */
  async take(dropped) {
    if (!this.raw.hidden) return
    const problems = []
    for (const file of dropped) {
      try {
        const name = await bring(file, (text) => this.say(text))
        await refresh()
        this.restructure(() => this.rows.push(newRow(name)))
      } catch (error) {
        problems.push(error.message)
      }
    }
    this.say(problems.join('\n'), true)
  }

  /** Say something below the rows; it goes with the next change. */
  say(text, wrong = false) {
    const shown = this.message.textContent
    this.message.textContent = text
    this.message.hidden = !text
    this.message.classList.toggle('graft-problem', wrong)
    if (text !== shown) this.refit()
  }

  remove(row) {
    const at = this.rows.indexOf(row)
    this.restructure(
      () => this.rows.splice(at, 1),
      () =>
        this.rows.length
          ? this.focus(this.rows[Math.min(at, this.rows.length - 1)], '.graft-remove')
          : this.adder.focus(),
    )
  }

  move(row, to) {
    const from = this.rows.indexOf(row)
    if (to < 0 || to >= this.rows.length || to === from) return
    this.restructure(
      () => (this.rows = moved(this.rows, from, to)),
      () => this.focus(row, '.graft-handle'),
    )
  }

  focus(row, selector) {
    this.list.children[this.rows.indexOf(row)]?.querySelector(selector)?.focus()
  }

  /** Fit the node to its rows. A loaded graph brings its own size. */
  refit() {
    const height = this.height()
    if (height === this.drawnHeight || !this.element.isConnected) return
    const grown = this.drawnHeight === undefined || height > this.drawnHeight
    this.drawnHeight = height
    fit(this.node, !grown)
  }

  draw() {
    this.heads.hidden = !this.rows.length || this.list.hidden
    this.list.replaceChildren(...this.rows.map((row, index) => drawRow(this, row, index)))
  }
}

/** What is wrong with a row: {near: names that may be meant, if its file is missing; problems: of its texts}. */
async function looked(row, known) {
  const found = { problems: [] }
  if (!known.has(plain(row.file))) found.near = await files.near(row.file).catch(() => []) // no file name has none
  if (`${row.blocks}${row.schedule}`.trim()) {
    const { problems } = await files.rowCheck(row).catch((error) => ({ problems: { blocks: error.message } }))
    const labels = { blocks: t('Block weights'), schedule: t('Schedule') }
    found.problems = Object.entries(problems).map(([name, text]) => `${labels[name]}: ${text}`)
  }
  return found
}

api.addEventListener?.('reconnected', () => refresh())
