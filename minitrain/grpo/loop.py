"""The GRPO loop: sample, reward, compare, train, and bring the new weights to the sampler.

    step k     responses to the step's prompts -> rewards -> advantages -> packed micro-batches -> log-probabilities
               under the weights at hand and the reference, where they are needed -> one or several updates -> refit

On policy (grpo.lag=0) every rank does all of it, and the responses come from the weights that are trained. One step off
(lag=1), the responses of step k + 1 are sampled with the weights that step k begins with: then some ranks can sample
(grpo.generation_ranks) while the others train, in lockstep: at a step's end the responses go one way, the weights the
other. No queue, no threads; the age of a response is 1 by construction, and the same run in one process gives the same.

All ranks know all responses, and compute from them what is needed; just the model's work is divided.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from minitrain.config import Config, to_dict
from minitrain.config_checks import check_layout
from minitrain.errors import InputError
from minitrain.grpo.advantages import advantages, has_signal
from minitrain.grpo.batches import micro_batches
from minitrain.grpo.problems import Problem, Problems, open_problems
from minitrain.grpo.refit import Refit
from minitrain.grpo.rollouts import Collector, Group, read_rollouts, rewards, write_rollouts
from minitrain.models.decoder import Decoder
from minitrain.parallel.context import split
from minitrain.parallel.mesh import Meshes, owned, start, world_size
from minitrain.parallel.pipeline import Pipeline
from minitrain.rollout.engine import Sampler
from minitrain.training.build import build_model, sum_over
from minitrain.training.checkpoint import Checkpointer
from minitrain.training.loop import Trainer, to_device
from minitrain.training.loss import linear_log_probs
from minitrain.training.metrics import MetricsLog
