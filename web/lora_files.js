/** The LoRA files that the host knows: their names, kept for a while, and what a file says about itself. */
import { asked } from './editor.js'
import { plain } from './rows.js'

let listed = null // a promise of the names
let plainNames = null // a promise of them as a set
const said = new Map() // by route, a promise of what it answered

/** Names of all LoRA files. */
export function names() {
  if (!listed) {
    listed = asked('/graft/loras').then((found) => found.loras)
    listed.catch(() => (listed = null))
  }
  return listed
}

/** The names of all LoRA files with forward slashes, as a set. */
export function known() {
  if (!plainNames) {
    plainNames = names().then((found) => new Set(found.map(plain)))
    plainNames.catch(() => (plainNames = null))
  }
  return plainNames
}

/** What a file says about itself: {size, base, ranks, words, …}, as the pack's route gives it. */
export const info = (name) => once(`/graft/lora_info?name=${encodeURIComponent(name)}`)

/** Names of files that a missing one may have been. */
export const near = (name) => once(`/graft/near_loras?name=${encodeURIComponent(name)}`).then((found) => found.near)

/** A file's preview picture: {picture: a data URL or '', problem: why it cannot be shown}. */
export const preview = (name) => once(`/graft/lora_preview?name=${encodeURIComponent(name)}`)

/** What is wrong with a row's texts, and the strengths of its file's blocks: {problems, blocks}. */
export function rowCheck({ file, blocks, schedule }) {
  return once(`/graft/lora_row?${new URLSearchParams({ name: file, blocks, schedule })}`)
}

function once(route) {
  if (!said.has(route)) {
    const promise = asked(route)
    said.set(route, promise)
    promise.catch(() => said.delete(route))
  }
  return said.get(route)
}

/** Forget everything, so that files that came or changed are seen. */
export function forget() {
  listed = plainNames = null
  said.clear()
}
