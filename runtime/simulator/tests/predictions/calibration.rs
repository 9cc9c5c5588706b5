//! Numbers of a machine, fitted to tables of measurements: known numbers are found again, and predictions hold for steps that were left out.
//!
//! `a100_node_steps.csv` and `a100_node_all_reduce.csv` are from vTrain (arXiv 2312.12391), under the MIT licence: GPTs trained by Megatron-DeepSpeed on
//! a node of A100, and NCCL's all-reduces there.

mod closed_form;
mod held_out;
mod recovery;
mod refusal;
mod standard_errors;
mod steps;
