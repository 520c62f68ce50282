/** Graft's section in the editor's settings. */
import { app } from './editor.js'

const changed = new Map()

/** The settings as the editor wants them. */
export const SETTINGS = [
  {
    id: 'Graft.Training.Smoothing',
    category: ['Graft', 'Training', 'Smoothing'],
    name: 'Loss curve smoothing',
    type: 'slider',
    defaultValue: 0.95,
    attrs: { min: 0, max: 0.99, step: 0.01 },
    tooltip: 'How much the loss curve is smoothed. 0 shows the raw loss.',
  },
  {
    id: 'Graft.Training.Previews',
    category: ['Graft', 'Training', 'Previews'],
    name: 'Previews kept on Train Step',
    type: 'number',
    defaultValue: 400,
    attrs: { min: 0, max: 1000, step: 1 },
    tooltip: 'Keeps this many of the newest previews. 0 shows none.',
  },
  {
    id: 'Graft.Training.Notice',
    category: ['Graft', 'Training', 'Notice'],
    name: 'Desktop notice when training ends',
    type: 'boolean',
    defaultValue: false,
    tooltip: 'The browser asks for your permission once. A tab with the editor has to stay open.',
  },
  {
    id: 'Graft.LoRAStack.Step',
    category: ['Graft', 'LoRA stack', 'Step'],
    name: 'LoRA strength step',
    type: 'number',
    defaultValue: 0.05,
    attrs: { min: 0.01, max: 1, step: 0.01 },
    tooltip: 'How much an arrow key changes a LoRA strength.',
  },
].map((declared) => ({
  ...declared,
  onChange: (value, before) => changed.get(declared.id)?.forEach((act) => act(value, before)),
}))

/** The value of a setting. */
export function setting(id) {
  return app.extensionManager?.setting?.get(id) ?? SETTINGS.find((one) => one.id === id).defaultValue
}

/** Call `act(value, before)` when a setting changes; `before` is undefined when the page reads it. */
export function onSetting(id, act) {
  changed.set(id, [...(changed.get(id) ?? []), act])
}
