/** Reads and writes the JSON in GraftLoRAStack's input `rows`, by the same rules as the pack's own reader. */
import { t } from './texts.js'

const VERSION = 1

/** Rows of the JSON text; throws an Error that says what is wrong. Fields that this version does not know are kept. */
export function parse(text) {
  const content = JSON.parse(text.trim() || '{"version": 1, "rows": []}')
  if (content === null || typeof content !== 'object' || !Array.isArray(content.rows)) {
    throw new Error('expected {"version": 1, "rows": […]}')
  }
  if (content.version !== VERSION) {
    throw new Error(
      t('these rows have version {version}, this Graft reads version {own}: update Graft', {
        version: content.version,
        own: VERSION,
      }),
    )
  }
  for (const [index, entry] of content.rows.entries()) {
    if (entry === null || typeof entry !== 'object' || typeof entry.file !== 'string') {
      throw new Error(`row ${index + 1} names no file`)
    }
  }
  return content.rows.map((entry) => ({
    on: true,
    model: 1,
    blocks: '',
    schedule: '',
    partial: false,
    ...entry,
    clip: entry.clip ?? entry.model ?? 1,
  }))
}

/** The JSON text of rows. */
export function write(rows) {
  return JSON.stringify({ version: VERSION, rows })
}

/** A new row for a file. */
export function row(file) {
  return { file, on: true, model: 1, clip: 1, blocks: '', schedule: '', partial: false }
}

/** A file's name with forward slashes: a list of Windows has backslashes, and a workflow may come from elsewhere. */
export const plain = (file) => file.replaceAll('\\', '/')

/** Move the element at `from` to `to`, in a new list. */
export function moved(rows, from, to) {
  const out = [...rows]
  const [taken] = out.splice(from, 1)
  out.splice(to, 0, taken)
  return out
}

/** Names that contain every word of the query, case ignored; those that start with it first. */
export function matching(names, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean)
  const found = names.filter((name) => {
    const lowered = name.toLowerCase()
    return words.every((word) => lowered.includes(word))
  })
  const first = words[0]
  if (!first) return found
  const starts = (name) => name.toLowerCase().split(/[\\/]/).pop().startsWith(first)
  return [...found.filter(starts), ...found.filter((name) => !starts(name))]
}
