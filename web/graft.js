/** Graft in the editor: which widget belongs to which node. Uses ComfyUI's public extension API only. */
import { foldAdvanced } from './advanced.js'
import { addAveragePanel } from './average.js'
import * as dataset from './dataset.js'
import { replaceDefaultGraph } from './default_graph.js'
import { addStyle, watchTheme } from './dom.js'
import { app, widen } from './editor.js'
import { labelFields } from './field_labels.js'
import * as folder from './folder_chooser.js'
import { fitPages, followLinks } from './help_pages.js'
import { addConflictsPanel } from './lora_conflicts.js'
import { addEffectPanel } from './lora_effect.js'
import { TYPE, loraRows, refresh } from './lora_stack.js'
import * as notice from './notice.js'
import * as problems from './problems.js'
import { SETTINGS } from './settings.js'
import { colorSockets } from './socket_colors.js'
import * as subgraphPanels from './subgraph_panels.js'
import * as todo from './todo.js'
import * as training from './training.js'

const CREATED = {
  ApplyToDo: todo.addTodoPanel,
  EMAMerge: addAveragePanel,
  GraftDataset: dataset.addDatasetPanel,
  GraftLoRAConflicts: addConflictsPanel,
  GraftLoRAEffect: addEffectPanel,
  GraftTrainPairStart: training.keepSeed,
  GraftTrainStart: training.keepSeed,
  TrainStep: training.addTrainingPanel,
}

const LEAST_WIDTH = 180 // for whole titles
const WITH_ROWS = ['GraftLoRAStack', 'GraftLoadLoRAs']

app.registerExtension({
  name: 'Graft',
  settings: SETTINGS,
  setup() {
    addStyle()
    watchTheme()
    colorSockets()
    fitPages()
    followLinks()
    problems.listen()
    training.listen()
    notice.listen()
    todo.listen()
    dataset.listen()
    folder.listen()
    subgraphPanels.listen()
    return replaceDefaultGraph()
  },
  getCustomWidgets: () => ({ [TYPE]: loraRows, [folder.TYPE]: folder.folderChooser }),
  beforeRegisterNodeDef(nodeType, nodeData) {
    // The input stays a text, which a link may give; only what draws it changes.
    if (nodeData.name === 'GraftDataset') nodeData.input.optional.folder[1].widgetType = folder.TYPE
    if (!WITH_ROWS.includes(nodeData.name)) return
    const rows = nodeData.input.required.rows
    nodeData.input.required.rows = [TYPE, rows[1]]
  },
  nodeCreated(node) {
    CREATED[node.comfyClass]?.(node)
    if (node.constructor.nodeData?.category?.startsWith('Graft/')) {
      widen(node, LEAST_WIDTH)
      foldAdvanced(node)
      labelFields(node)
    }
    if (node.subgraph) folder.listsOutside()
  },
  afterConfigureGraph() {
    folder.listsOutside()
    subgraphPanels.place()
  },
  refreshComboInNodes() {
    dataset.refresh()
    folder.refreshOutside()
    return refresh()
  },
})
