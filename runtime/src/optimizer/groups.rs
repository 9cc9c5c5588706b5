//! Groups of parameters, with options of their own.

use std::fmt;
use std::sync::Arc;

use hsdp_sharding::{ModelSpec, Param, Plan, Role, UnitId};
use serde_json::{Value, json};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::rule::{self, Rule, rate_of, set_rate};
use crate::options::digest;
use crate::persist::saved::{RATE, SavedOptions};

/// The options of an optimizer, and those of its groups.
#[derive(Clone, Debug)]
pub(super) struct GroupedOptions<O> {
    /// The kind of optimizer.
    pub(super) kind: &'static str,
    /// The options of parameters that are in no group.
    pub(super) options: O,
    /// The same, as the program gave them when it made the optimizer.
    made_with: O,
    groups: Vec<OptionsGroup<O>>,
    plan: Arc<Plan>,
    /// By unit and parameter: the index of its group. Empty as long as there is no group.
    of: Vec<Vec<Option<usize>>>,
}

/// The rule that the learning rate of a group follows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RateSchedule {
    /// The rate of the optimizer, times this ratio.
    Ratio(f64),
    /// The rate of the optimizer, which was 0 when the group got another one: there is no ratio.
    Undefined,
    /// The rates that are set for the group alone.
    Own,
}

impl RateSchedule {
    /// Returns the rate of a group that follows an optimizer of this rate; 0 without a ratio.
    fn rate(self, optimizer: f64) -> f64 {
        match self {
            Self::Ratio(ratio) => optimizer * ratio,
            Self::Undefined | Self::Own => 0.0,
        }
    }
}

#[derive(Clone, Debug)]
struct OptionsGroup<O> {
    options: O,
    /// The same, as the program gave them when it made the group.
    made_with: O,
    schedule: RateSchedule,
    /// Schedule with which the program made the group. Rates of 0 in `made_with` do not show it.
    made_schedule: RateSchedule,
    /// The number of its parameters.
    parameters: usize,
    /// The digest of their names, which ranks compare.
    names: u64,
}

impl<O: Rule> GroupedOptions<O> {
    pub(super) fn none(model: &ShardedModel, kind: &'static str, options: O) -> Self {
        let plan = Arc::clone(&model.engine.context.plan);
        Self { kind, options, made_with: options, groups: Vec::new(), plan, of: Vec::new() }
    }

    pub(super) fn spec(&self) -> &ModelSpec {
        self.plan.spec()
    }

    /// Makes a group of the trainable parameters that `has` accepts and that are in no group yet.
    pub(super) fn with(
        mut self,
        has: impl Fn(&Param) -> bool,
        change: impl FnOnce(O) -> O,
    ) -> Self {
        let units = self.plan.spec().units();
        self.of.resize_with(units.len(), Vec::new);
        let mut names = Vec::new();
        for (unit, of) in units.iter().zip(&mut self.of) {
            of.resize(unit.params.len(), None);
            for (param, of) in unit.params.iter().zip(of) {
                if of.is_none() && param.role == Role::Trainable && has(param) {
                    *of = Some(self.groups.len());
                    names.push(param.name.clone());
                }
            }
        }
        let (options, schedule) = changed(self.options, change);
        let parameters = names.len();
        let names = digest::of_lines(&names);
        let (made_with, made_schedule) = (options, schedule);
        let group = OptionsGroup { options, made_with, schedule, made_schedule, parameters, names };
        self.groups.push(group);
        self
    }

    /// The options of a parameter.
    pub(super) fn of(&self, unit: UnitId, param: usize) -> &O {
        match self.group_of(unit, param) {
            Some(group) => &self.groups[group].options,
            None => &self.options,
        }
    }

    fn group_of(&self, unit: UnitId, param: usize) -> Option<usize> {
        self.of.get(unit.index())?[param]
    }

    /// All options, each with a test of whether a parameter has them.
    pub(super) fn each(&self) -> impl Iterator<Item = (&O, impl Fn(UnitId, usize) -> bool)> {
        let groups = self.groups.iter().enumerate();
        let groups = groups.map(|(index, group)| (Some(index), &group.options));
        groups.chain([(None, &self.options)]).map(move |(index, options)| {
            (options, move |unit, param| self.group_of(unit, param) == index)
        })
    }

    /// The options of the groups.
    pub(super) fn of_groups(&self) -> impl Iterator<Item = &O> {
        self.groups.iter().map(|group| &group.options)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        rule::check(&self.options, &self.kind)?;
        for (index, group) in self.groups.iter().enumerate() {
            if group.schedule == RateSchedule::Undefined {
                let what = format!(
                    "{} group {index} changes the learning rate, which was 0: there is no \
                     ratio to keep; make the group of an optimizer whose rate is above 0",
                    self.kind
                );
                return Err(Error::Options { what });
            }
            rule::check(&group.options, &format_args!("{} group {index}", self.kind))?;
        }
        Ok(())
    }

    /// Sets the learning rate of a group, which has a schedule of its own from now on.
    ///
    /// # Panics
    /// If there is no such group.
    pub(super) fn set_learning_rate_of(&mut self, group: usize, rate: f64) {
        let kind = self.kind;
        let made = self.groups.len();
        let found = self.groups.get_mut(group);
        let group = found.unwrap_or_else(|| panic!("group {group} of {kind}: it has {made}"));
        set_rate(&mut group.options, rate);
        group.schedule = RateSchedule::Own;
    }

    /// Sets the learning rate. That of each group keeps its ratio to it.
    pub(super) fn set_learning_rate(&mut self, rate: f64) {
        set_rate(&mut self.options, rate);
        for group in &mut self.groups {
            if let RateSchedule::Ratio(ratio) = group.schedule {
                set_rate(&mut group.options, rate * ratio);
            }
        }
    }

    /// A line for each option, and for the parameters of each group, for the comparison of ranks.
    pub(super) fn lines(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let kind = self.kind;
            write!(f, "{}", rule::lines(&self.options, &kind))?;
            for (index, group) in self.groups.iter().enumerate() {
                let OptionsGroup { options, parameters, names, .. } = group;
                writeln!(f, "{kind} group {index}: {parameters} parameters, names {names:#018x}")?;
                write!(f, "{}", rule::lines(options, &format_args!("{kind} group {index}")))?;
            }
            Ok(())
        })
    }

    /// Returns the present options for a checkpoint, those of groups by their index.
    pub(super) fn json(&self) -> Value {
        let mut all = self.json_of(&self.options, |group| &group.options);
        for (index, group) in self.groups.iter().enumerate() {
            let ratio = match group.schedule {
                RateSchedule::Ratio(ratio) => Value::from(ratio),
                RateSchedule::Own => Value::Null,
                RateSchedule::Undefined => continue,
            };
            all[GROUPS][index][RATIO] = ratio;
        }
        all
    }

    /// Returns the options with which the program made the optimizer and its groups, for a
    /// checkpoint.
    pub(super) fn made_with(&self) -> Value {
        self.json_of(&self.made_with, |group| &group.made_with)
    }

    fn json_of(&self, options: &O, of_group: impl Fn(&OptionsGroup<O>) -> &O) -> Value {
        let mut all = rule::json(options);
        if !self.groups.is_empty() {
            let group = |group: &OptionsGroup<O>| {
                let parameters = group.parameters;
                let options = rule::json(of_group(group));
                let names = format!("{:#018x}", group.names);
                json!({ "parameters": parameters, "names": names, "options": options })
            };
            all[GROUPS] = self.groups.iter().map(group).collect();
        }
        all
    }

    /// Returns the same groups with the options of a checkpoint, whose groups are these.
    ///
    /// # Errors
    /// The name of an option that the checkpoint lacks, or that this kind of optimizer cannot set.
    pub(super) fn following(&self, saved: SavedOptions<'_>) -> Result<Self, String> {
        let mut following = self.clone();
        match saved {
            SavedOptions::Own => {}
            SavedOptions::Rates { now } => following.take_rates(now)?,
            SavedOptions::All { now, made_with } => following.take_all(now, made_with)?,
        }
        Ok(following)
    }

    fn take_rates(&mut self, now: &Value) -> Result<(), String> {
        let kind = self.kind;
        let saved_rate = |options: &Value, of: &dyn fmt::Display| {
            let rate = options[RATE].as_f64();
            rate.ok_or_else(|| format!("{of} {RATE} is {} there, and not a number", options[RATE]))
        };
        let rate = saved_rate(now, &kind)?;
        set_rate(&mut self.options, rate);
        for (index, group) in self.groups.iter_mut().enumerate() {
            let saved = &now[GROUPS][index];
            let of_group = saved_rate(&saved["options"], &format_args!("{kind} group {index}"))?;
            let made = group.made_schedule;
            let follows = of_group == made.rate(rate);
            // A group without a ratio keeps the rate of 0 that it was made with.
            let is_undefined = of_group == 0.0 && rate_of(&group.made_with) == 0.0;
            let (schedule, of_group) = match saved.get(RATIO).map(Value::as_f64) {
                Some(None) => (RateSchedule::Own, of_group),
                // A group that changes a rate of 0 takes no ratio: the saved group left the rate.
                Some(Some(ratio)) if made != RateSchedule::Undefined => {
                    (RateSchedule::Ratio(ratio), of_group)
                }
                // An older format has no ratio, and neither has a group without one.
                None if !follows && !is_undefined => (RateSchedule::Own, of_group),
                _ => (made, made.rate(rate)),
            };
            group.schedule = schedule;
            set_rate(&mut group.options, of_group);
        }
        Ok(())
    }

    fn take_all(&mut self, now: &Value, made_with: &Value) -> Result<(), String> {
        let kind = self.kind;
        rule::set(&mut self.made_with, made_with, &kind)?;
        rule::set(&mut self.options, now, &kind)?;
        for (index, group) in self.groups.iter_mut().enumerate() {
            let of = format_args!("{kind} group {index}");
            rule::set(&mut group.made_with, &made_with[GROUPS][index]["options"], &of)?;
            let saved = &now[GROUPS][index];
            rule::set(&mut group.options, &saved["options"], &of)?;
            group.made_schedule = match saved[RATIO].as_f64() {
                Some(ratio) => RateSchedule::Ratio(ratio),
                None => {
                    let rate = rate_of(&self.made_with);
                    schedule(rate, rate_of(&group.made_with), group.made_schedule)
                }
            };
        }
        self.take_rates(now)
    }
}

/// Names in the options of a checkpoint: of the groups, and of the ratio that a group's rate keeps
/// to that of the optimizer, which is null if the group has a schedule of its own.
const GROUPS: &str = "groups";
const RATIO: &str = "ratio";

/// Returns the schedule of a group that an optimizer of one rate made with the other. Returns that
/// of the program, `own`, if rates of 0 do not show it.
fn schedule(rate: f64, of_group: f64, own: RateSchedule) -> RateSchedule {
    let is_hidden = rate == 0.0 || own == RateSchedule::Undefined && of_group == 0.0;
    if is_hidden { own } else { RateSchedule::Ratio(of_group / rate) }
}

/// Returns the options of a group, and the schedule of its learning rate. If the rate of the
/// optimizer is 0, `change` gets 1 instead, to see whether it changes the rate.
fn changed<O: Rule>(mut options: O, change: impl FnOnce(O) -> O) -> (O, RateSchedule) {
    let rate = rate_of(&options);
    if rate != 0.0 {
        let of_group = change(options);
        let ratio = rate_of(&of_group) / rate;
        return (of_group, RateSchedule::Ratio(ratio));
    }
    set_rate(&mut options, 1.0);
    let mut of_group = change(options);
    let is_changed = rate_of(&of_group) != 1.0;
    set_rate(&mut of_group, rate);
    (of_group, if is_changed { RateSchedule::Undefined } else { RateSchedule::Ratio(1.0) })
}
