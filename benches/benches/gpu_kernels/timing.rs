//! Rows of launches, and how long the device takes for them.

use std::hint;
use std::time::{Duration, Instant};

use hsdp_benches::times::{least, median};
use hsdp_kernels::cuda::{CudaError, Moment, Stream};

use crate::case::{Case, Ends, Failure};
use crate::copy::Copy;
use crate::options::Options;
use crate::source::{PATIENCE, Source};

/// Launches that find out how many go into a row.
const TRIALS: u32 = 3;

/// The most launches of a row, and the most copies of a head: with their events they must have room
/// in a stream of the driver, which takes about a thousand operations before it has its caller
/// wait.
const MOST_LAUNCHES: u32 = 100;
const MOST_COPIES: u32 = 128;

/// Bytes that one copy of the head moves; and where only a look is wanted.
const HEAD: usize = 512 << 20;
const SMALL_HEAD: usize = 2 << 20;

/// What was measured.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Bytes that one launch reads and writes, and its copy.
    pub(crate) bytes: usize,
    /// Of one launch, in each row.
    pub(crate) times: Vec<Duration>,
    /// Of one copy, in each row.
    pub(crate) copies: Vec<Duration>,
}

impl Measured {
    /// How much of the rate of a copy it reaches, by the medians.
    pub(crate) fn of_a_copy(&self) -> f64 {
        median(&self.copies).as_secs_f64() / median(&self.times).as_secs_f64()
    }

    pub(crate) fn least(&self) -> Duration {
        least(&self.times)
    }

    pub(crate) fn median(&self) -> Duration {
        median(&self.times)
    }
}

/// Takes times of a stream.
pub(crate) struct Clock<'a> {
    stream: &'a Stream,
    samples: u32,
    each: Duration,
    /// What keeps the device busy while a row is issued: so many of these copies.
    head: Copy,
    copies: u32,
}

impl<'a> Clock<'a> {
    pub(crate) fn new(source: &Source<'a>, options: &Options) -> Result<Self, CudaError> {
        let head = Copy::moving(source, if options.smoke { SMALL_HEAD } else { HEAD })?;
        let Options { samples, each, .. } = *options;
        Ok(Self { stream: source.stream, samples, each, head, copies: 2 })
    }

    /// Times rows of a case and of a copy, by turns.
    pub(crate) fn measure(
        &mut self,
        case: &mut dyn Case,
        copy: &mut Copy,
    ) -> Result<Measured, Failure> {
        let [launches, of_copy] = [self.fitting(case)?, self.fitting(copy)?];
        let mut measured = Measured { bytes: case.bytes(), times: Vec::new(), copies: Vec::new() };
        for _ in 0..self.samples {
            measured.times.push(self.row(case, launches)?);
            measured.copies.push(self.row(copy, of_copy)?);
        }
        Ok(measured)
    }

    /// How many launches go into a row. The first is not timed: it may have something to prepare.
    fn fitting(&mut self, case: &mut dyn Case) -> Result<u32, Failure> {
        case.issue(self.stream, 1)?;
        let one = self.row(case, TRIALS)?.max(Duration::from_nanos(1));
        let fitting = self.each.as_nanos() / one.as_nanos();
        Ok(u32::try_from(fitting).unwrap_or(MOST_LAUNCHES).clamp(TRIALS, MOST_LAUNCHES))
    }

    /// What one of so many launches takes.
    fn row(&mut self, case: &mut dyn Case, launches: u32) -> Result<Duration, Failure> {
        let row = match case.ends() {
            Ends::OnTheDevice => self.behind_a_head(case, launches)?,
            Ends::WithTheCall => {
                self.stream.moment()?.wait("what was before a row", PATIENCE)?;
                let began = Instant::now();
                case.issue(self.stream, launches)?;
                began.elapsed()
            }
        };
        Ok(row / launches)
    }

    /// From the end of a head that is long enough to the end of the row.
    fn behind_a_head(&mut self, case: &mut dyn Case, launches: u32) -> Result<Duration, Failure> {
        loop {
            self.head.issue(self.stream, self.copies)?;
            let head = self.stream.moment()?;
            case.issue(self.stream, launches)?;
            let row = self.stream.moment()?;
            if !head.has_come()? {
                let began = when(&head)?;
                return Ok(when(&row)?.duration_since(began));
            }
            if self.copies == MOST_COPIES {
                let copies = self.copies;
                return Err(Failure::Wrong(format!(
                    "{copies} copies were over before the host had issued {launches} launches"
                )));
            }
            self.copies *= 2;
            when(&row)?;
        }
    }
}

/// Waits for a moment without sleep, and says when it came.
fn when(moment: &Moment) -> Result<Instant, CudaError> {
    let began = Instant::now();
    while !moment.has_come()? {
        if began.elapsed() >= PATIENCE {
            // It has been waited for: this says so.
            moment.wait("a row of launches", Duration::ZERO)?;
        }
        hint::spin_loop();
    }
    Ok(Instant::now())
}
