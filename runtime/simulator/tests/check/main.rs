//! The judge of schedules: its verdicts beside known ones and beside a random scheduler, the words
//! of its explanations, and the schedules and flight records that it refuses.

mod bad_schedules;
mod explanations;
mod planned;
mod records;
mod schedules;
mod timings;
