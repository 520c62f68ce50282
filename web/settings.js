/** Graft's section in the editor's settings. */
import { app } from './editor.js'

const changed = new Map()

/** The settings as the editor wants them. */
export const SETTINGS = [
  {
    id: 'Graft.Training.Smoothing',
    category: ['Graft', 'Training', 'Smoothing'],
    name: 'Smoothing of the loss curve',
    type: 'slider',
    defaultValue: 0.95,
    attrs: { min: 0, max: 0.99, step: 0.01 },
    tooltip: 'Weight of what came before: 0 shows the loss as it is.',
  },
  {
    id: 'Graft.Training.Previews',
    category: ['Graft', 'Training', 'Previews'],
    name: 'Previews kept on Train Step',
    type: 'number',
    defaultValue: 6,
    attrs: { min: 0, max: 48, step: 1 },
    tooltip: 'The newest ones stay; 0 shows none.',
  },
  {
    id: 'Graft.LoRAStack.Step',
    category: ['Graft', 'LoRA stack', 'Step'],
    name: 'Step of a LoRA strength',
    type: 'number',
    defaultValue: 0.05,
    attrs: { min: 0.01, max: 1, step: 0.01 },
    tooltip: 'By how much the arrow keys change it.',
  },
].map((declared) => ({
  ...declared,
  onChange: (value) => changed.get(declared.id)?.forEach((act) => act(value)),
}))

/** The value of a setting. */
export function setting(id) {
  return app.extensionManager?.setting?.get(id) ?? SETTINGS.find((one) => one.id === id).defaultValue
}

/** Call `act` when a setting changes. */
export function onSetting(id, act) {
  changed.set(id, [...(changed.get(id) ?? []), act])
}
