/** Graft in the editor: which widget belongs to which node. Uses ComfyUI's public extension API only. */
import { addStyle } from './dom.js'
import { app } from './editor.js'
import { TYPE, loraRows, refresh } from './lora_stack.js'

addStyle()

app.registerExtension({
  name: 'Graft.LoRAStack',
  getCustomWidgets: () => ({ [TYPE]: loraRows }),
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== 'GraftLoRAStack') return
    const rows = nodeData.input.required.rows
    nodeData.input.required.rows = [TYPE, rows[1]]
  },
  refreshComboInNodes: refresh,
})
