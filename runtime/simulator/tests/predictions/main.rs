//! Predictions beside measurements, published times, closed forms and random machines; the search
//! for the best mesh; steps whose replicas divide state; traces of simulated steps.

mod all_reduce;
mod calibration;
mod monotony;
mod offload;
mod published;
mod repetition;
mod search;
mod slices;
mod traces;
