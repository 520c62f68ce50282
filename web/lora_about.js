/** What a LoRA file says of itself, in its row: picture, trigger words to copy, facts. */
import { copy } from './clipboard.js'
import { el, short, size } from './dom.js'
import * as files from './lora_files.js'
import { t } from './texts.js'

/** A box with what a file says; `filled` is called when it is there. */
export function about(file, filled) {
  const box = el('div', { class: 'graft-about' }, t('Reading …'))
  Promise.all([files.info(file), files.preview(file)])
    .then(
      ([said, seen]) => box.replaceChildren(...described(said), ...shown(seen)),
      (error) => box.replaceChildren(t('No file info: {error}', { error: error.message })),
    )
    .then(filled)
  return box
}

/** A small picture of a file, or null if it has none. */
export async function thumbnail(file) {
  const { picture } = await files.preview(file)
  return picture ? el('img', { class: 'graft-thumbnail', src: picture, alt: '', draggable: false }) : null
}

/** All trigger words of a file, each once. */
export function wordsOf(said) {
  return [...new Set([said.words, ...(said.noted ?? [])])].filter(Boolean)
}

function shown({ picture, problem }) {
  if (problem) return [el('div', {}, t('No preview picture: {problem}', { problem }))]
  return picture ? [el('img', { class: 'graft-preview', src: picture, alt: t('Preview picture') })] : []
}

/** What a file says of itself, in this order, and how it is called. */
const SAID = {
  words: 'Trigger words',
  embeddings: 'Embeddings',
  title: 'Title',
  base: 'Base model',
  kinds: 'Layers',
  ranks: 'Rank',
  alphas: 'Alpha',
  text_encoder: 'Text encoder',
  todo: 'ToDo',
  ema: 'EMA',
  on_top_of: 'Trained on top of',
  steps: 'Steps',
  resolution: 'Resolution',
  tags: 'Tags',
  types: 'Data type',
  size: 'Size',
}

function described(said) {
  const rows = Object.keys(SAID).flatMap((name) => {
    const content = contentOf(name, said)
    return content.length ? [el('dt', {}, t(SAID[name])), el('dd', {}, ...content)] : []
  })
  return rows.length ? [el('dl', {}, ...rows)] : [t('This file has no metadata.')]
}

function contentOf(name, said) {
  if (name === 'words') return wordsOf(said).map((words) => chip(words))
  if (name === 'embeddings') return (said.embeddings ?? []).map((word) => chip(`embedding:${word}`))
  if (name === 'tags') return (said.tags ?? []).map(([tag, count]) => chip(tag, count))
  const text = worded(name, said[name])
  return text ? [text] : []
}

/** Words that a click copies, and how often they were trained. */
function chip(words, count) {
  const button = el(
    'button',
    { class: 'graft-chip', type: 'button', title: t('Copy'), 'aria-label': t('Copy “{words}”', { words }) },
    words,
    count === undefined ? null : el('span', { class: 'graft-dim' }, ` ${count}`),
  )
  button.addEventListener('click', async () => {
    const done = (await copy(words)) ? t('Copied') : t('The browser does not let this page copy')
    const note = el('span', { class: 'graft-copied', role: 'status' }, ` ${done}`)
    button.after(note)
    setTimeout(() => note.remove(), 2000)
  })
  return button
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
