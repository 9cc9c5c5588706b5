//! Rules of optimizers that hsdp does not have.

use hsdp::{Rule, Run, RunState, Setting};

/// Moves each element by the sign of its gradient.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    /// The distance.
    pub rate: f64,
    /// A value that ranks compare, and that nothing else uses.
    pub mark: f64,
}

impl Rule for Signs {
    const KIND: &'static str = "signs";

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("rate", Setting::Rate(&mut self.rate));
        see("mark", Setting::Choice(&self.mark, &mut |_| false));
    }

    fn update(&self, _: u64, run: Run<'_>, _: RunState<'_>) {
        #[expect(clippy::cast_possible_truncation, reason = "a rate of a test")]
        let rate = self.rate as f32;
        for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient) {
            *parameter -= rate * (gradient * run.clip).signum();
        }
    }
}
