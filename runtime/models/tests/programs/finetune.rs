//! `finetune` as a program: a folder of transformers in, another out, and its refusals.

mod data;
mod ends;
mod export;
mod families;
mod place;
mod refusals;
mod training;
