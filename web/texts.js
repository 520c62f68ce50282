/** Translates the panels' texts to the editor's language. The English text in the code is the key. */
import { app } from './editor.js'
import { CHINESE } from './chinese.js'

const LANGUAGES = { zh: CHINESE }

/** A text in the editor's language, with values in place of {names}; what a language lacks stays English. */
export function t(text, values = {}) {
  const table = LANGUAGES[app.extensionManager?.setting?.get('Comfy.Locale')] ?? {}
  return (table[text] ?? text).replace(/\{(\w+)\}/g, (_, name) => values[name])
}
