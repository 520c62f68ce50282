/** The LoRA files that the host knows: their names, kept for a while, and what a file says about itself. */
import { asked } from './editor.js'

let listed = null // a promise of the names
const said = new Map() // by route, a promise of what it answered

/** Names of all LoRA files. */
export function names() {
  if (!listed) {
    listed = asked('/graft/loras').then((found) => found.loras)
    listed.catch(() => (listed = null))
  }
  return listed
}

/** What a file says about itself: {size, base, ranks, words, …}, as the pack's route gives it. */
export const info = (name) => once(`/graft/lora_info?name=${encodeURIComponent(name)}`)

/** Names of files that a missing one may have been. */
export const near = (name) => once(`/graft/near_loras?name=${encodeURIComponent(name)}`).then((found) => found.near)

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
  listed = null
  said.clear()
}
