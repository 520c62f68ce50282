/**
 * The widget of GraftDataset's input `folder`: a list of input's folders with their numbers of pictures, to search and
 * choose from. The value stays a text, and the socket takes a text as before.
 */
import { el } from './dom.js'
import { addElement, api, asked, changing, everyNode, wordsOf } from './editor.js'
import { close, pick } from './picker.js'
import { t } from './texts.js'

export const TYPE = 'GRAFT_FOLDER'
const HEIGHT = 24 // with the margin, as the editor's own widgets have it
const MARGIN = 2
const choosers = new WeakMap()
const lists = new WeakMap() // of subgraphs' own nodes; the editor itself holds their widgets weakly and would lose them

/** The folders of ComfyUI's input folder: {folders: [{name, pictures}], cut, pictures, captions}. */
export const folders = () => asked('/graft/dataset/folders')

/** The chooser of a node, undefined where its editor draws the input as a plain text. */
export const chooserOf = (node) => choosers.get(node)

/** Follow the graph: the editor makes the widgets of a subgraph's own node anew when something changes. Once. */
export function listen() {
  api.addEventListener('graphChanged', listsOutside)
}

/**
 * On a subgraph's own node the editor draws no widget of a pack: a folder that is shown there becomes a list of the
 * editor's own.
 */
export function listsOutside() {
  everyNode((node) => {
    if (!node.subgraph) return
    const found = (node.widgets ?? []).filter((widget) => widget.type === TYPE && !widget.element)
    found.forEach(becomeList)
    const kept = (lists.get(node) ?? []).filter((widget) => node.widgets.includes(widget))
    lists.set(node, [...kept, ...found])
  })
}

/** Read the folders again for every subgraph's own node. */
export const refreshOutside = () => everyNode((node) => lists.get(node)?.forEach(fillList))

function becomeList(widget) {
  Object.defineProperty(widget, 'type', { get: () => 'combo', configurable: true })
  // as tall as a list is, where Nodes 2.0 would give it room as it does a panel
  Object.defineProperty(widget, 'computeLayoutSize', { value: undefined, configurable: true })
  fillList(widget)
}

async function fillList(widget) {
  widget.options.values = [widget.value]
  let found
  try {
    found = await folders()
  } catch {
    return // the server is away, which the page says
  }
  const names = found.folders.map(({ name }) => name)
  widget.options.values = [...new Set([widget.value, ...names])].filter(Boolean)
}

/** Draw the chooser of a node; returns {widget} as the editor's widget makers do. */
export function folderChooser(node, name, data) {
  const chooser = new Chooser(node, data?.[1]?.default ?? '')
  const widget = addElement(node, name, TYPE, chooser.element, {
    getValue: () => chooser.value,
    setValue: (text) => chooser.read(text),
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
    margin: MARGIN,
  })
  chooser.widget = widget
  choosers.set(node, chooser)
  const removed = widget.onRemove
  widget.onRemove = function () {
    removed?.call(this)
    close()
  }
  return { widget }
}

class Chooser {
  constructor(node, value) {
    this.node = node
    this.name = el('span', { class: 'graft-file' })
    this.note = el('span', { class: 'graft-dim' })
    this.button = el(
      'button',
      { class: 'graft-button graft-chooser', type: 'button', onclick: () => this.choose() },
      this.name,
      this.note,
      el('span', { 'aria-hidden': 'true' }, '▾'),
    )
    this.element = el(
      'div',
      { class: 'graft graft-folder' },
      el('div', { class: 'graft-line' }, el('span', { class: 'graft-dim' }, t('image folder')), this.button),
    )
    this.element.addEventListener('keydown', (event) => {
      if (!(event.ctrlKey || event.metaKey)) event.stopPropagation()
    })
    this.read(value)
  }

  /** Take the value that the graph gives: a saved workflow, an undo, a paste. */
  read(text) {
    this.value = String(text ?? '')
    this.tell()
    this.onRead?.()
  }

  /** Say how many pictures the folder has, or that something is wrong with it; or what a link gives instead. */
  tell({ count, wrong = false, linked } = {}) {
    this.name.textContent = linked ?? (this.value || t('choose a folder'))
    this.note.textContent = count === undefined ? '' : String(count)
    this.button.disabled = linked !== undefined
    this.button.title = linked ?? this.value
    this.button.setAttribute('aria-label', `${t('image folder')}: ${this.name.textContent}`)
    this.button.classList.toggle('graft-missing', wrong)
  }

  /** Set the folder by hand: one step of undo. */
  take(name) {
    changing(() => {
      this.value = name
      this.widget.callback?.(name)
    })
    this.read(name)
  }

  async choose() {
    let found
    try {
      found = await folders()
    } catch (error) {
      this.onProblem?.(t('The list of folders cannot be read: {error}', { error: wordsOf(error) }))
      return
    }
    const counts = new Map(found.folders.map(({ name, pictures }) => [name, pictures]))
    const words = {
      title: t('Choose an image folder'),
      search: t('Search folders'),
      none: counts.size ? t('no such folder') : t('The input folder has no folders yet; drop one on the node'),
      note: (name) => t(counts.get(name) === 1 ? '{count} picture' : '{count} pictures', { count: counts.get(name) }),
    }
    if (found.cut) words.title = t('Choose an image folder (the list is not complete)')
    pick(this.button, [...counts.keys()], this.value, (name) => this.take(name), words)
  }
}
