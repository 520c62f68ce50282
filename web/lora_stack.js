/** The widget of GraftLoRAStack's input `rows`: add, order, switch and weigh LoRAs. Its value is the rows' JSON. */
import { api, changing, fit, heightOf } from './editor.js'
import { el, short, size } from './dom.js'
import * as files from './lora_files.js'
import { close, pick } from './picker.js'
import { problemBox } from './problem_box.js'
import { moved, parse, plain, row as newRow, write } from './rows.js'
import { setting } from './settings.js'
import { t } from './texts.js'

export const TYPE = 'GRAFT_LORA_ROWS'
const PER_PIXEL = 0.01 // strength a pixel of dragging
const panels = new Set()

/** Draw the rows of a node; returns {widget} as the editor's widget makers do. */
export function loraRows(node, name, data) {
  const panel = new Rows(node, data?.[1]?.default ?? '')
  const widget = node.addDOMWidget(name, TYPE, panel.element, {
    hideOnZoom: false,
    hideInPanel: true,
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
  }
  return { widget, minWidth: 380, minHeight: 120 }
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
    this.missing = new Map() // row -> near names
    this.list = el('div', { class: 'graft-rows', role: 'list', 'aria-label': t('LoRAs of the stack') })
    this.problem = el('div', { class: 'graft-problem', role: 'alert', hidden: true })
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
    this.content = el(
      'div',
      { class: 'graft-content' },
      problemBox(node),
      this.problem,
      this.raw,
      this.list,
      el('div', { class: 'graft-foot' }, this.adder, this.all),
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
      this.list.hidden = this.adder.hidden = this.all.hidden = false
    } catch (error) {
      this.rows = []
      this.raw.value = this.text
      this.problem.textContent = t('These rows cannot be read: {error}', { error: error.message })
      this.problem.hidden = this.raw.hidden = false
      this.list.hidden = this.adder.hidden = this.all.hidden = true
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
      if (this.raw.hidden) this.text = write(this.rows)
      this.widget?.callback?.(this.text)
    })
  }

  /** A change that shows only in the row's own fields: nothing is drawn anew, so the field keeps the focus. */
  set(row, name, value) {
    if (row[name] !== value) this.edited(() => (row[name] = value))
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

  /** Flag the rows that are on and whose file is not there, with names that it may be. */
  async check() {
    const turn = (this.turn = (this.turn ?? 0) + 1)
    const found = new Map()
    try {
      const known = new Set((await files.names()).map(plain))
      const gone = this.rows.filter((row) => row.on && !known.has(plain(row.file)))
      const near = (row) => files.near(row.file).catch(() => []) // a text that cannot be a file name has none
      await Promise.all(gone.map(async (row) => found.set(row, await near(row))))
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
    this.missing = found
    for (const [index, row] of this.rows.entries()) this.flag(this.list.children[index], row)
  }

  flag(element, row) {
    if (!element) return
    const names = this.missing.get(row)
    element.classList.toggle('graft-missing', names !== undefined)
    const note = element.querySelector('.graft-note')
    const same = note.hidden === (names === undefined)
    note.hidden = names === undefined
    if (names !== undefined) {
      const offers = names.flatMap((name, index) => [index ? t(' or ') : '', this.replacement(row, name)])
      note.replaceChildren(
        `${t('There is no file “{file}” in the loras folders.', { file: row.file })} `,
        ...(names.length ? [t('Use '), ...offers, t('?')] : [t('Copy it there and press R, or choose another file.')]),
      )
    }
    if (!same) this.refit()
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

  async choose(row, anchor = this.adder) {
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
    const words = { title: t('Choose a LoRA'), search: t('Search LoRAs'), none: t('no such LoRA') }
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

  /** Fit the node to its rows after a change by hand, as one undo step. A loaded graph brings its own size. */
  refit() {
    const height = this.height()
    if (height === this.drawnHeight || !this.element.isConnected) return
    const grown = this.drawnHeight === undefined || height > this.drawnHeight
    this.drawnHeight = height
    fit(this.node, !grown)
  }

  draw() {
    this.list.replaceChildren(...this.rows.map((row, index) => this.drawn(row, index)))
  }

  drawn(row, index) {
    const where = t('row {number}, {file}', { number: index + 1, file: row.file })
    const handle = el(
      'button',
      {
        class: 'graft-icon graft-handle',
        type: 'button',
        title: t('Drag to reorder, or use the arrow keys'),
        'aria-label': t('Move {where}', { where }),
        onkeydown: (event) => {
          const by = { ArrowUp: -1, ArrowDown: 1 }[event.key]
          if (!by) return
          event.preventDefault()
          event.stopPropagation()
          this.move(row, this.rows.indexOf(row) + by)
        },
      },
      '⠿',
    )
    const on = el('input', {
      type: 'checkbox',
      class: 'graft-on',
      checked: row.on,
      title: t('On or off'),
      'aria-label': t('Use {where}', { where }),
    })
    on.addEventListener('change', () => {
      this.set(row, 'on', on.checked)
      item.classList.toggle('graft-off', !row.on)
      this.check()
    })
    const file = el(
      'button',
      {
        class: 'graft-button graft-file',
        type: 'button',
        title: row.file,
        'aria-label': t('File of {where}; choose another', { where }),
        onclick: () => this.choose(row, file),
      },
      row.file.replace(/\.safetensors$/, ''),
    )
    const model = this.strength(row, 'model', t('Model strength of {where}', { where }))
    const clip = this.strength(row, 'clip', t('CLIP strength of {where}', { where }))
    const info = this.toggle('i', 'graft-info-button', t('File info of {where}', { where }), this.informed, row)
    const more = this.toggle(
      '⋯',
      'graft-more',
      t('Block weights and schedule of {where}', { where }),
      this.unfolded,
      row,
    )
    const remove = el(
      'button',
      {
        class: 'graft-icon graft-remove',
        type: 'button',
        title: t('Remove'),
        'aria-label': t('Remove {where}', { where }),
        onclick: () => this.remove(row),
      },
      '✕',
    )
    const line = el('div', { class: 'graft-line' }, handle, on, file, model, clip, info, more, remove)
    const note = el('div', { class: 'graft-note', role: 'alert', hidden: true })
    const item = el('div', { class: `graft-row${row.on ? '' : ' graft-off'}`, role: 'listitem' }, line, note)
    if (this.informed.has(row)) item.append(this.about(row))
    if (this.unfolded.has(row)) item.append(this.fold(row, where))
    this.dragging(handle, item, row)
    return item
  }

  toggle(sign, kind, label, opened, row) {
    const button = el(
      'button',
      {
        class: `graft-icon ${kind}`,
        type: 'button',
        title: label,
        'aria-label': label,
        'aria-expanded': String(opened.has(row)),
      },
      sign,
    )
    button.addEventListener('click', () => {
      if (!opened.delete(row)) opened.add(row)
      changing(() => {
        this.draw()
        this.refit()
      })
      this.check()
      this.focus(row, `.${kind}`)
    })
    return button
  }

  strength(row, name, label) {
    const input = el('input', {
      type: 'number',
      class: `graft-number graft-${name}`,
      step: setting('Graft.LoRAStack.Step'),
      min: -100,
      max: 100,
      value: String(row[name]),
      title: t('{label}: type, use the arrow keys, or drag', { label }),
      'aria-label': label,
    })
    const take = () => {
      const value = input.valueAsNumber
      if (Number.isFinite(value) && Math.abs(value) <= 100) this.set(row, name, Math.round(value * 1e4) / 1e4)
      else input.value = String(row[name])
    }
    input.addEventListener('change', take)
    input.addEventListener('focus', () => input.select())
    input.addEventListener('pointerdown', (event) => {
      if (event.button !== 0 || document.activeElement === input) return
      event.preventDefault()
      const [start, first] = [event.clientX, row[name]]
      let dragged = false
      input.setPointerCapture(event.pointerId)
      const move = (to) => {
        const by = to.clientX - start
        if (!dragged && Math.abs(by) < 3) return
        dragged = true
        input.value = String(Math.round(Math.max(-100, Math.min(100, first + by * PER_PIXEL)) * 100) / 100)
      }
      const end = () => {
        input.removeEventListener('pointermove', move)
        input.removeEventListener('pointerup', end)
        input.removeEventListener('pointercancel', end)
        if (dragged) take()
        else {
          input.focus()
          input.select()
        }
      }
      input.addEventListener('pointermove', move)
      input.addEventListener('pointerup', end)
      input.addEventListener('pointercancel', end)
    })
    return input
  }

  fold(row, where) {
    const field = (name, label, placeholder) => {
      const input = el('input', {
        type: 'text',
        class: 'graft-text',
        value: row[name],
        placeholder,
        'aria-label': t('{label} of {where}', { label, where }),
        spellcheck: false,
      })
      input.addEventListener('change', () => this.set(row, name, input.value.trim()))
      return el('label', { class: 'graft-field' }, el('span', {}, label), input)
    }
    const partial = el('input', {
      type: 'checkbox',
      checked: row.partial,
      'aria-label': t('Apply {where} even if only some of its layers fit', { where }),
    })
    partial.addEventListener('change', () => this.set(row, 'partial', partial.checked))
    return el(
      'div',
      { class: 'graft-fold' },
      field('blocks', t('Block weights'), t('1,0,0.5,… or IN=0, OUT05=0.5')),
      field('schedule', t('Schedule'), t('0.2-0.8, or 0:1, 0.5:0.3, 1:0')),
      el(
        'label',
        { class: 'graft-field' },
        el('span', {}, t('Partial match')),
        partial,
        el(
          'span',
          { class: 'graft-hint' },
          t('apply the layers that fit, even if the LoRA was made for another model'),
        ),
      ),
    )
  }

  about(row) {
    const box = el('div', { class: 'graft-about' }, t('Reading …'))
    files
      .info(row.file)
      .then(
        (said) => box.replaceChildren(...described(said)),
        (error) => box.replaceChildren(t('No file info: {error}', { error: error.message })),
      )
      .then(() => this.refit())
    return box
  }

  dragging(handle, item, row) {
    handle.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return
      handle.setPointerCapture(event.pointerId)
      item.classList.add('graft-dragged')
      const order = [...this.list.children]
      let to = this.rows.indexOf(row)
      const move = (at) => {
        const others = order.filter((other) => other !== item)
        const before = others.filter((other) => {
          const box = other.getBoundingClientRect()
          return at.clientY > box.top + box.height / 2
        }).length
        if (before === to) return
        to = before
        this.list.insertBefore(item, others[before] ?? null)
        handle.setPointerCapture(event.pointerId)
      }
      const end = (last) => {
        handle.removeEventListener('pointermove', move)
        handle.removeEventListener('pointerup', end)
        handle.removeEventListener('pointercancel', end)
        item.classList.remove('graft-dragged')
        const from = this.rows.indexOf(row)
        if (last.type === 'pointerup' && to !== from) this.move(row, to)
        else this.draw()
      }
      handle.addEventListener('pointermove', move)
      handle.addEventListener('pointerup', end)
      handle.addEventListener('pointercancel', end)
    })
  }
}

/** What a file says of itself, in this order, and how it is called. */
const SAID = {
  words: 'Trigger words',
  title: 'Title',
  base: 'Base model',
  kinds: 'Layers',
  ranks: 'Rank',
  alphas: 'Alpha',
  text_encoder: 'Text encoder',
  todo: 'ToDo',
  ema: 'EMA',
  steps: 'Steps',
  resolution: 'Resolution',
  tags: 'Tags',
  types: 'Data type',
  size: 'Size',
}

function described(said) {
  const found = Object.keys(SAID).map((name) => [name, worded(name, said[name])])
  const rows = found
    .filter(([, text]) => text)
    .flatMap(([name, text]) => [el('dt', {}, t(SAID[name])), el('dd', {}, text)])
  return rows.length ? [el('dl', {}, ...rows)] : [t('This file has no metadata.')]
}

/** A value as text: {lora: 32} is "lora 32", [["hat", 3]] is "hat 3", nothing is "". */
function worded(name, value) {
  if (value === null || value === undefined) return ''
  if (name === 'size') return size(value)
  if (typeof value === 'number') return short(value, 6)
  if (typeof value === 'boolean') return value ? t('yes') : t('no')
  if (typeof value !== 'object') return String(value)
  const entries = Array.isArray(value) ? value : Object.entries(value)
  return entries
    .map((one) => (Array.isArray(one) ? one.map((part) => worded('', part)).join(' ') : worded('', one)))
    .join(', ')
}

api.addEventListener?.('reconnected', () => refresh())
