"""The embedded host, for all of Graft: the only module that imports comfyui_api_stubs."""

from ..comfyui_api_stubs import MODULES, caching, install
from ..comfyui_api_stubs.caching import Caching, new_executor
from ..comfyui_api_stubs.editor import serve as editor
from ..comfyui_api_stubs.host import Host
from ..comfyui_api_stubs.host_error import HostError
from ..comfyui_api_stubs.workflows import node_replacements, prompt_text, workflow
from ..comfyui_api_stubs.workflows.problem import Problem, WorkflowError
from ..comfyui_api_stubs.workflows.schema import COMBO, Input, Schema, catalogue, describe
from ..comfyui_api_stubs.workflows.widgets import UPLOADS, EditorNode
from ..comfyui_api_stubs.workflows.workflow import Catalogue, Document, Graph
from ..comfyui_api_stubs.workflows.workflow_inside import workflow_inside

__all__ = [
    "COMBO",
    "MODULES",
    "UPLOADS",
    "Caching",
    "Catalogue",
    "Document",
    "EditorNode",
    "Graph",
    "Host",
    "HostError",
    "Input",
    "Problem",
    "Schema",
    "WorkflowError",
    "caching",
    "catalogue",
    "describe",
    "editor",
    "install",
    "new_executor",
    "node_replacements",
    "prompt_text",
    "workflow",
    "workflow_inside",
]
