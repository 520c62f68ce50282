/** The LoRA files that the host knows: their names, kept for a while, and what a file says about itself. */
import { asked } from './editor.js'

let listed = null // a promise of the names
const said = new Map()

/** Names of all LoRA files; `again` asks the host anew. */
export function names(again = false) {
  if (again || !listed) {
    listed = asked('/graft/loras').then((found) => found.loras.map((entry) => entry.name ?? entry))
    listed.catch(() => (listed = null))
  }
  return listed
}

/** What a file says about itself: {name, size, base_model, rank, alpha, trained_words, …}. */
export function info(name) {
  if (!said.has(name)) {
    const promise = asked(`/graft/lora_info?name=${encodeURIComponent(name)}`)
    said.set(name, promise)
    promise.catch(() => said.delete(name))
  }
  return said.get(name)
}

/** Forget everything, so that files that came or changed are seen. */
export function forget() {
  listed = null
  said.clear()
}
