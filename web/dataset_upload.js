/**
 * Files and folders that are dropped on a Dataset: says what would go where, asks about names that are already there,
 * and uploads through ComfyUI's own route. Nothing is written over unless a person says so.
 */
import { el, size } from './dom.js'
import { api, asked, wordsOf } from './editor.js'
import { folders } from './folder_chooser.js'
import { t } from './texts.js'

const MOST_FILES = 20_000
const AT_ONCE = 3
const NAMED = 5 // files in a message
const TOO_LARGE = 'larger than {size}, left out: {names}. Copy them into ComfyUI’s input folder.'

/** The entries of a drop. They are gone after the event, so they are taken at once. */
export const entriesOf = (event) =>
  [...(event.dataTransfer?.items ?? [])].map((item) => item.webkitGetAsEntry?.()).filter(Boolean)

/** Every file in entries as {path, file}, hidden ones left out. Throws an Error when there are too many. */
export async function filesIn(entries, parent = '', found = []) {
  for (const entry of entries) {
    if (entry.name.startsWith('.')) continue
    const path = parent + entry.name
    if (entry.isDirectory) await filesIn(await childrenOf(entry), `${path}/`, found)
    else found.push({ path, file: await new Promise((done, failed) => entry.file(done, failed)) })
    if (found.length > MOST_FILES) {
      throw new Error(t('More than {count} files: copy the folder into ComfyUI’s input folder', { count: MOST_FILES }))
    }
  }
  return found
}

async function childrenOf(directory) {
  const reader = directory.createReader()
  const children = []
  for (;;) {
    const some = await new Promise((done, failed) => reader.readEntries(done, failed))
    if (!some.length) return children
    children.push(...some)
  }
}

/**
 * Sort dropped files: {folder, files} to upload and `refused`, a line each. `folder` is the name of a dropped folder, or
 * the one that is chosen.
 */
export async function plan(entries, chosen) {
  const { pictures, captions } = await folders()
  const largest = api.getServerFeature?.('max_upload_size') ?? Infinity
  const single = entries.length === 1 && entries[0].isDirectory
  const all = single ? await filesIn(await childrenOf(entries[0])) : await filesIn(entries)
  const endings = [...pictures, ...captions]
  const kept = new Map() // by the name as systems without upper and lower case see it
  const others = []
  const large = []
  const twice = []
  for (const { path, file } of all) {
    if (!endings.some((ending) => path.toLowerCase().endsWith(ending))) others.push(path)
    else if (file.size >= largest) large.push(path)
    else if (kept.has(path.toLowerCase())) twice.push(path)
    else kept.set(path.toLowerCase(), { path, file })
  }
  const refused = [
    [others, t('no pictures or captions, left out: {names}', { names: named(others) })],
    [large, t(TOO_LARGE, { size: size(largest), names: named(large) })],
    [twice, t('the name of another dropped file, left out: {names}', { names: named(twice) })],
  ]
  return {
    folder: single ? entries[0].name : chosen,
    files: [...kept.values()],
    refused: refused.filter(([names]) => names.length).map(([, line]) => line),
  }
}

const intoWords = (count, bytes) =>
  count === 1 ? t('1 file ({size}) into', { size: bytes }) : t('{count} files ({size}) into', { count, size: bytes })

/** The first few of many names. */
export const named = (names) => names.slice(0, NAMED).join(', ') + (names.length > NAMED ? ` … (${names.length})` : '')

/**
 * Ask where dropped files go and upload them. Shows itself in `holder`; `done(folder, problems)` is called at the end,
 * with null when a person cancels.
 */
export function askAndUpload(holder, { folder, files, refused }, done) {
  const target = el('input', {
    class: 'graft-text',
    type: 'text',
    value: folder,
    placeholder: t('name of the folder'),
    'aria-label': t('Folder below ComfyUI’s input folder'),
    spellcheck: false,
  })
  const said = el('div', { class: 'graft-problem', role: 'alert', hidden: true })
  const foot = el('div', { class: 'graft-foot' })
  const total = files.reduce((sum, { file }) => sum + file.size, 0)
  const shut = (...result) => {
    asking.remove()
    done(...result)
  }
  const asking = el(
    'div',
    { class: 'graft-asking' },
    ...refused.map((line) => el('div', { class: 'graft-problem' }, line)),
    el('label', { class: 'graft-line' }, el('span', {}, intoWords(files.length, size(total))), target),
    said,
    foot,
  )
  const say = (line) => {
    said.textContent = line
    said.hidden = !line
  }
  const button = (text, act) => el('button', { class: 'graft-button', type: 'button', onclick: act }, text)
  const cancel = () => button(t('Cancel'), () => shut(null, []))
  const send = async (chosen, name, overwrite) => {
    const stop = new AbortController()
    const progress = el('span', { class: 'graft-dim', role: 'status' })
    foot.replaceChildren(
      button(t('Stop'), () => stop.abort()),
      progress,
    )
    const tell = (count) => (progress.textContent = t('{count} of {all} uploaded', { count, all: chosen.length }))
    shut(name, [...refused, ...(await upload(chosen, name, overwrite, stop.signal, tell))])
  }
  let begun = false
  const begin = async () => {
    if (begun) return
    const name = target.value.trim().replace(/^\/+|\/+$/g, '')
    if (!name) {
      say(t('Give the folder a name.'))
      target.focus()
      return
    }
    begun = true
    let there
    try {
      there = await asked(`/graft/dataset/files?${new URLSearchParams({ folder: name })}`)
    } catch (error) {
      begun = false
      say(wordsOf(error))
      return
    }
    if (!asking.isConnected) return // cancelled meanwhile
    const known = new Set(there.files.map((one) => one.toLowerCase()))
    const fresh = files.filter(({ path }) => !known.has(path.toLowerCase()))
    if (fresh.length === files.length) {
      send(files, name, false)
      return
    }
    const taken = files.filter((one) => !fresh.includes(one)).map(({ path }) => path)
    say(t('Already in {folder}: {names}', { folder: name, names: named(taken) }))
    target.disabled = true
    foot.replaceChildren(
      button(t('Skip these'), () => send(fresh, name, false)),
      button(t('Replace them'), () => send(files, name, true)),
      cancel(),
    )
  }
  foot.append(button(t('Upload'), begin), cancel())
  for (const name of ['keydown', 'pointerdown']) asking.addEventListener(name, (event) => event.stopPropagation())
  target.addEventListener('keydown', (event) => event.key === 'Enter' && begin())
  if (files.length) holder.replaceChildren(asking)
  else shut(null, refused)
  target.focus()
}

/** Upload files, a few at a time; returns what went wrong, a line each. */
async function upload(files, folder, overwrite, signal, tell) {
  const waiting = [...files]
  const failed = []
  let count = 0
  const work = async () => {
    for (let one = waiting.shift(); one && !signal.aborted; one = waiting.shift()) {
      const problem = await uploadOne(one, folder, overwrite, signal)
      if (problem) failed.push(`${one.path}: ${problem}`)
      else tell(++count)
    }
  }
  tell(0)
  await Promise.all(Array.from({ length: AT_ONCE }, work))
  const problems = failed.slice(0, NAMED)
  if (failed.length > NAMED) problems.push(t('and {count} more', { count: failed.length - NAMED }))
  if (signal.aborted) problems.push(t('Stopped: {count} of {all} uploaded', { count, all: files.length }))
  return problems
}

/** Upload one file; what went wrong, or undefined. */
async function uploadOne({ path, file }, folder, overwrite, signal) {
  const parts = path.split('/')
  const name = parts.pop()
  const body = new FormData()
  body.append('image', file, name)
  body.append('type', 'input')
  body.append('subfolder', [folder, ...parts].join('/'))
  if (overwrite) body.append('overwrite', 'true')
  try {
    const response = await api.fetchApi('/upload/image', { method: 'POST', body, signal })
    if (response.status === 413) return t('too large for this ComfyUI (its option --max-upload-size)')
    if (!response.ok) return `${(await response.text()).slice(0, 200) || response.statusText} (${response.status})`
    const stored = await response.json()
    if (stored.name !== name) return t('another file took the name; it is stored as {name}', { name: stored.name })
  } catch (error) {
    return signal.aborted ? t('stopped') : error.message
  }
  return undefined
}
