/**
 * Of two previews of one prompt a person says which is better. The server keeps both as a preference pair in a folder that
 * Dataset reads.
 */
import { asked, posted, wordsOf } from './editor.js'
import { t } from './texts.js'

const fileOf = ({ subfolder, filename }) => `${subfolder}/${filename}`
const runOf = ({ subfolder }) => (subfolder ?? '').split('/').at(-2) ?? '' // graft/RUN/previews

export class Preferences {
  constructor() {
    this.clear()
  }

  clear() {
    this.run = '' // the last that was asked about
    this.marked = new Set() // "better worse"
    this.say('')
  }

  /** Whether a person has said that this picture is better than the other. */
  prefers(picture, other) {
    return this.marked.has(`${fileOf(picture)} ${fileOf(other)}`)
  }

  async mark(better, worse) {
    const pair = { run: runOf(better), better: better.filename, worse: worse.filename }
    let kept
    try {
      kept = await posted('/graft/preferences', pair)
    } catch (error) {
      this.say(t('The pair is not kept: {error}', { error: wordsOf(error) }), true)
      return
    }
    this.marked.delete(`${fileOf(worse)} ${fileOf(better)}`)
    this.marked.add(`${fileOf(better)} ${fileOf(worse)}`)
    this.say(wordsAbout(kept))
  }

  /** Find what has been marked of this picture's run before. */
  async recall(picture) {
    const run = runOf(picture)
    if (!run) return
    if (run !== this.run) this.clear()
    this.run = run
    let before
    try {
      before = await asked(`/graft/preferences?run=${encodeURIComponent(run)}`)
    } catch (error) {
      if (this.run !== run) return // another run is shown by now
      this.say(t('Earlier marks are not known: {error}', { error: wordsOf(error) }), true)
      return
    }
    if (this.run !== run) return
    const pairs = before.marked.map((names) => names.map((filename) => fileOf({ ...picture, filename })))
    for (const [better, worse] of pairs) {
      if (!this.marked.has(`${worse} ${better}`)) this.marked.add(`${better} ${worse}`) // a click since then counts
    }
    if (before.pairs && !this.said) this.say(wordsAbout({ ...before, captioned: true }))
  }

  say(said, isProblem = false) {
    Object.assign(this, { said, isProblem })
  }
}

/** What is said of a pair that is kept. */
function wordsAbout({ folder, pairs, name, captioned }) {
  const one = '{count} pair in {folder}: choose this folder in Dataset'
  const more = '{count} pairs in {folder}: choose this folder in Dataset'
  const words = t(pairs === 1 ? one : more, { count: pairs, folder })
  if (captioned) return words
  return `${words}. ${t('The text of the prompt is not known: write the caption of {name} in Dataset.', { name })}`
}
