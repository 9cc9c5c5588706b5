use super::*;
use crate::{Accumulation, Mesh, ModelSpec, Param, PlanOptions, Unit};

/// One microbatch with every unit resharded, nothing ahead, and no replicas.
const PLAIN: &str = "g0 u0 g1 u1 g2 u2 g2' u2' r2 g1' u1' r1 g0' u0' r0";
/// What every microbatch does before its first reduction.
const FORWARD: &str = "g0 u0 g1 u1 g2 u2 g2' u2'";

fn three_units() -> ModelSpec {
    let unit = |name: &str| Unit::new(name).param(Param::new(format!("{name}.w"), [6]));
    ["a", "b", "c"].into_iter().fold(ModelSpec::new(), |spec, name| spec.unit(unit(name)))
}

/// A machine, and what its rank says in exchanges in place of all ranks.
struct Rank {
    machine: StepMachine,
    ranks: usize,
    words: Vec<String>,
}

impl Rank {
    fn new(spec: ModelSpec, mesh: [usize; 2], options: PlanOptions, rules: Rules) -> Self {
        let mesh = Mesh::new(mesh[0], mesh[1]).expect("a mesh");
        let plan = Plan::new(spec, mesh, options).expect("a plan");
        let machine = StepMachine::new(Arc::new(plan), rules);
        Self { machine, ranks: mesh.world_size(), words: Vec::new() }
    }

    /// Takes all outputs. Operations complete at once, so that all-reduces follow their reduce-scatters
    /// where they may.
    fn run(&mut self) {
        loop {
            while let Some(output) = self.machine.poll() {
                self.words.push(output.to_string());
                let answered = match output {
                    Output::Await(operation) | Output::Follow(operation) => {
                        self.machine.done(operation)
                    }
                    Output::Exchange(exchange) => {
                        let conclusion = self.conclusion(exchange);
                        self.machine.conclude(conclusion)
                    }
                    _ => Ok(()),
                };
                answered.expect("it is waited for");
            }
            match self.machine.watching() {
                Some(operation) => self.machine.done(operation).expect("it is watched"),
                None => return,
            }
        }
    }

    fn conclusion(&self, exchange: Exchange) -> Conclusion {
        let supply = |input| Supply::default().renewed((0..self.ranks).map(|_| input));
        match exchange {
            Exchange::Headers => Conclusion::Headers(Headers::of_data(self.ranks)),
            Exchange::Microbatch(input) | Exchange::Batch(input) => {
                Conclusion::Supply(supply(input))
            }
            Exchange::Unit { says, place } => {
                let records = vec![(says, place); self.ranks];
                let declared = self.machine.orders.declared().plan.order();
                let (place, next) = NextUnit::of(&records, declared);
                Conclusion::Unit(place, next)
            }
            Exchange::Interim { .. } => Conclusion::Overflow(None),
            _ => Conclusion::Agreed,
        }
    }

    fn feed(&mut self, input: impl FnOnce(&mut StepMachine) -> Result<(), Refused>) {
        input(&mut self.machine).expect("it has its place");
        self.run();
    }

    /// A microbatch that uses all units forward and backward.
    fn microbatch(&mut self) {
        let spec = self.machine.plan.spec().clone();
        let units: Vec<UnitId> = spec.unit_ids().collect();
        self.feed(StepMachine::begin_microbatch);
        units.iter().for_each(|unit| self.feed(|machine| machine.need(*unit)));
        self.feed(StepMachine::loss);
        for unit in units.iter().rev() {
            if spec[*unit].after_forward == crate::AfterForward::Reshard {
                self.feed(|machine| machine.need(*unit));
            }
            if spec[*unit].is_trainable() {
                self.feed(|machine| machine.offer(*unit));
            }
        }
        self.feed(StepMachine::end_microbatch);
        self.words.push("\n".to_owned());
    }

    /// The gathers, hand-outs, reduce-scatters and all-reduces so far, a line for each microbatch.
    fn operations(&self) -> String {
        let is_shown = |word: &&String| word.starts_with(['g', 'u', 'r', 'a', '\n']);
        let words: Vec<&str> = self.words.iter().filter(is_shown).map(String::as_str).collect();
        words.join(" ").replace(" \n ", "\n").replace(" \n", "")
    }
}

/// Nothing ahead, the declared order from the first microbatch on.
fn plain() -> (PlanOptions, Rules) {
    let options = PlanOptions { prefetch: 0, ..PlanOptions::default() };
    (options, Rules { order: UnitOrder::Error, ..Rules::default() })
}

/// The operations of a step of so many microbatches; of two where the number is not given.
fn order(
    spec: ModelSpec,
    mesh: [usize; 2],
    options: (PlanOptions, Rules),
    microbatches: Option<usize>,
) -> String {
    let mut rank = Rank::new(spec, mesh, options.0, options.1);
    rank.feed(|machine| machine.begin(Begin::step(0, microbatches)));
    (0..microbatches.unwrap_or(2)).for_each(|_| rank.microbatch());
    rank.feed(StepMachine::finish);
    rank.operations()
}

#[test]
fn a_step_is_written_in_words() {
    let (options, rules) = plain();
    let mut rank = Rank::new(three_units(), [1, 2], options, rules);
    rank.feed(|machine| machine.begin(Begin::step(0, Some(1))));
    rank.microbatch();
    rank.feed(StepMachine::finish);
    let expected = "<headers> g0 (g0) u0 g1 (g1) u1 g2 (g2) u2 <weights> g2' (g2') u2' r2 \
                    g1' (g1') u1' r1 g0' (g0') u0' r0 \n (r2) (r1) (r0) <statement>";
    assert_eq!(rank.words.join(" "), expected);
    assert!(!rank.machine.is_in_step());
}

#[test]
fn gathers_are_issued_when_they_or_those_before_them_are_needed() {
    let ahead = |prefetch| {
        let (options, rules) = plain();
        order(three_units(), [1, 2], (PlanOptions { prefetch, ..options }, rules), Some(1))
    };
    assert_eq!(ahead(0), PLAIN);
    assert_eq!(ahead(1), "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' r1 u0' r0");
    assert_eq!(ahead(2), "g0 g1 g2 u0 g2' u1 g1' u2 g0' u2' r2 u1' r1 u0' r0");
    assert_eq!(ahead(100), "g0 g1 g2 g2' g1' g0' u0 u1 u2 u2' r2 u1' r1 u0' r0");
}

#[test]
fn nothing_is_gathered_ahead_while_the_order_is_found() {
    let rules = Rules { order: UnitOrder::Follow, ..Rules::default() };
    let first = "g0 u0 g1 u1 g2 u2 g2' g1' u2' r2 g0' u1' r1 u0' r0";
    let second = "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' r1 u0' r0";
    let found = order(three_units(), [1, 2], (PlanOptions::default(), rules), Some(2));
    assert_eq!(found, [first, second].join("\n"));
}

#[test]
fn all_reduces_start_in_the_last_microbatch_where_it_is_known() {
    let last = format!("{FORWARD} r2 a2 g1' u1' r1 a1 g0' u0' r0 a0");
    assert_eq!(order(three_units(), [2, 1], plain(), Some(2)), format!("{PLAIN}\n{last}"));
    let asked = order(three_units(), [2, 2], plain(), None);
    assert_eq!(asked, format!("{PLAIN}\n{PLAIN}\na2 a1 a0"));
}

#[test]
fn modes_differ_in_the_microbatches_that_reduce() {
    let mode = |accumulation, microbatches| {
        let (options, rules) = plain();
        let options = PlanOptions { accumulation, ..options };
        order(three_units(), [2, 2], (options, rules), microbatches)
    };
    let every = format!("{FORWARD} r2 g1' u1' r1 g0' u0' r0 a2 a1 a0");
    assert_eq!(mode(Accumulation::Every, Some(2)), format!("{every}\n{every}"));
    let first = format!("{FORWARD} g1' u1' g0' u0'");
    let last = format!("{FORWARD} r2 a2 g1' u1' r1 a1 g0' u0' r0 a0");
    assert_eq!(mode(Accumulation::Local, Some(2)), format!("{first}\n{last}"));
    assert_eq!(mode(Accumulation::Local, None), format!("{first}\n{first}\nr2 r1 r0 a2 a1 a0"));
}
