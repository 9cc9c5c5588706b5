//! The optimizer of each parameter in an update.

use std::fmt::Write as _;

use hsdp_sharding::{Param, ParamId, Role};

use crate::error::Error;
use crate::options::digest;
use crate::state::context::Context;

/// The optimizer of each parameter.
#[derive(Debug)]
pub(super) struct Assignment {
    /// Index of the optimizer of each parameter, by the parameter's number in the model, or
    /// [`NONE`].
    of: Vec<u16>,
    /// Kind of each optimizer that has one.
    kinds: Vec<Option<&'static str>>,
}

/// No optimizer: the parameter is frozen.
const NONE: u16 = u16::MAX;

impl Assignment {
    /// Gives each trainable parameter to the optimizer that selects it. `kinds` are those of the
    /// optimizers, and `selects` their tests of whether they update a parameter.
    ///
    /// # Errors
    /// [`Error::Options`] with the name of a parameter that no optimizer selects, or more than one.
    pub(super) fn new(
        context: &Context,
        kinds: Vec<Option<&'static str>>,
        selects: impl Iterator<Item = fn(&Param) -> bool> + Clone,
    ) -> Result<Self, Error> {
        let mut of = vec![NONE; context.parameters()];
        for (id, param) in context.plan.spec().params() {
            if param.role == Role::Trainable {
                let mut selected = selects.clone().enumerate().filter(|(_, has)| has(param));
                let one = (selected.next().map(|it| it.0), selected.next().map(|it| it.0));
                of[context.number_of(id)] = only(one, &param.name)?;
            }
        }
        Ok(Self { of, kinds })
    }

    /// Writes a line for the comparison of ranks, if there are several optimizers.
    pub(super) fn write(&self, optimizers: usize, lines: &mut String) {
        if optimizers > 1 {
            let digest = digest::of_numbers(&self.of);
            writeln!(lines, "parameters of {optimizers} optimizers {digest:#018x}")
                .expect("a text");
        }
    }

    /// The index of the optimizer of a parameter that is trained.
    pub(super) fn of(&self, context: &Context, parameter: ParamId) -> usize {
        usize::from(self.of[context.number_of(parameter)])
    }

    /// Describes the optimizer of a parameter that is trained.
    pub(super) fn text_of(&self, context: &Context, parameter: ParamId) -> String {
        let index = self.of(context, parameter);
        let kind = self.kinds[index].map_or_else(String::new, |kind| format!(" ({kind})"));
        format!("optimizer {index} of the update{kind}")
    }
}

fn only(selected: (Option<usize>, Option<usize>), name: &str) -> Result<u16, Error> {
    let what = match selected {
        (Some(one), None) => return Ok(u16::try_from(one).expect("a list of a few optimizers")),
        (Some(one), Some(other)) => {
            format!("parameter `{name}`: optimizers {one} and {other} of the update both select it")
        }
        (None, _) => format!("parameter `{name}`: no optimizer of the update selects it"),
    };
    Err(Error::Options { what })
}
