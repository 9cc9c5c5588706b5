//! The options of optimizers in a checkpoint and in the program that loads it.

use hsdp_checkpoint::{Manifest, OptimizerHead};
use serde_json::Value;

use super::settings::{OtherOptions, OtherParameters};
use crate::persist::checkpointed::AND;
use crate::persist::saved::{RATE, SavedOptions};

/// The options that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparedOptions {
    All,
    /// All but learning rates: an old checkpoint does not say with which the optimizer was made.
    ButRates,
}

/// Compares the options of a checkpoint with those of the program, whose optimizers have the head
/// `own`, of the same kind.
///
/// # Errors
/// All differences, if `others` does not allow them.
pub(super) fn agreed<'a>(
    manifest: &'a Manifest,
    own: &OptimizerHead,
    others: OtherOptions,
    parameters: OtherParameters,
) -> Result<SavedOptions<'a>, String> {
    let of_kind = manifest.optimizer.as_ref().filter(|it| it.kind == own.kind);
    let Some(OptimizerHead { options: now, made_with: saved, .. }) = of_kind else {
        return Ok(SavedOptions::Own);
    };
    if others == OtherOptions::KeepOwn {
        return Ok(SavedOptions::Own);
    }
    let made_with = saved.as_ref().unwrap_or(now);
    let compared = if saved.is_some() { ComparedOptions::All } else { ComparedOptions::ButRates };
    let mut wrong = differences(own, made_with, compared);
    if parameters == OtherParameters::TakeFitting {
        wrong.retain(|it| it.of != DifferenceOf::Members);
    }
    let refused = match others {
        OtherOptions::TakeSaved => wrong.iter().any(|it| it.of != DifferenceOf::Option),
        _ => !wrong.is_empty(),
    };
    if refused {
        let texts: Vec<&str> = wrong.iter().map(|it| &*it.text).collect();
        let what = format!(
            "its optimizer was made with other options: {}; give the optimizer these options, or \
             choose with \
             CheckpointOptions::other_options which count",
            texts.join("; ")
        );
        return Err(what);
    }
    Ok(match wrong.is_empty() {
        true => SavedOptions::Rates { now },
        false => SavedOptions::All { now, made_with },
    })
}

/// Returns the learning rates that a load replaces although the program has set them, or may have
/// made the optimizer with them: those of the program and those of the checkpoint, as text.
pub(super) fn replaced_rates(manifest: &Manifest, own: &OptimizerHead) -> Option<[String; 2]> {
    let saved = manifest.optimizer.as_ref()?;
    let [now, ours] = [&saved.options, &own.options].map(rates);
    let was_set = own.made_with.as_ref().map(rates) != Some(ours.clone());
    let is_old = saved.made_with.is_none();
    let texts = [&ours, &now].map(|rates| rates.join(", "));
    (ours != now && (was_set || is_old)).then_some(texts)
}

/// Returns the learning rates in some options, in their order.
fn rates(options: &Value) -> Vec<String> {
    match options {
        Value::Array(parts) => parts.iter().flat_map(rates).collect(),
        options => {
            let groups = options["groups"].as_array().into_iter().flatten();
            let all = [options].into_iter().chain(groups.map(|group| &group["options"]));
            all.filter_map(|options| options.get(RATE)).map(ToString::to_string).collect()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OptionDifference {
    of: DifferenceOf,
    text: String,
}

/// The kind of a difference: of an option, of the number of groups, or of the parameters of a
/// group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DifferenceOf {
    Option,
    Groups,
    Members,
}

fn differences(
    own: &OptimizerHead,
    saved: &Value,
    compared: ComparedOptions,
) -> Vec<OptionDifference> {
    let kinds: Vec<&str> = own.kind.split(AND).collect();
    let ours = own.made_with.as_ref().unwrap_or(&own.options);
    if ours == saved {
        return Vec::new();
    }
    let [ours, saved] = [ours, saved].map(parts);
    let mut wrong = Vec::new();
    if [ours.len(), saved.len()] != [kinds.len(); 2] {
        let there = saved.len();
        let here = ours.len();
        let kind = &own.kind;
        let text = format!("{kind} has options of {there} optimizers there, and of {here} here");
        return vec![OptionDifference { of: DifferenceOf::Groups, text }];
    }
    for ((kind, ours), saved) in kinds.into_iter().zip(ours).zip(saved) {
        compare_optimizer(kind, [saved, ours], compared, &mut wrong);
    }
    wrong
}

/// Returns the options of each optimizer of nested pairs, in the order of their kinds.
fn parts(options: &Value) -> Vec<&Value> {
    match options {
        Value::Array(all) => all.iter().flat_map(parts).collect(),
        options => vec![options],
    }
}

fn compare_optimizer(
    kind: &str,
    [saved, ours]: [&Value; 2],
    compared: ComparedOptions,
    wrong: &mut Vec<OptionDifference>,
) {
    compare_options(kind, [saved, ours], compared, wrong);
    let [saved, ours] = [saved, ours].map(|it| it["groups"].as_array().map_or(&[][..], |it| it));
    if saved.len() != ours.len() {
        let text = format!("{kind} has {} groups there, and {} here", saved.len(), ours.len());
        wrong.push(OptionDifference { of: DifferenceOf::Groups, text });
        return;
    }
    for (index, (saved, ours)) in saved.iter().zip(ours).enumerate() {
        let [there, here] = [saved, ours].map(|group| &group["parameters"]);
        let names = [saved, ours].map(|group| group.get("names"));
        let same_names = names[0].is_none() || names[0] == names[1];
        if there != here {
            let text =
                format!("{kind} group {index} has {there} parameters there, and {here} here");
            wrong.push(OptionDifference { of: DifferenceOf::Members, text });
        } else if !same_names {
            let text = format!("{kind} group {index} has other parameters there, also {there}");
            wrong.push(OptionDifference { of: DifferenceOf::Members, text });
        }
        let group = format!("{kind} group {index}");
        compare_options(&group, [&saved["options"], &ours["options"]], compared, wrong);
    }
}

fn compare_options(
    of: &str,
    [saved, ours]: [&Value; 2],
    compared: ComparedOptions,
    wrong: &mut Vec<OptionDifference>,
) {
    let names = |options: &Value| {
        options.as_object().map_or_else(Vec::new, |it| it.keys().cloned().collect())
    };
    let mut all: Vec<String> = names(ours);
    all.extend(names(saved).into_iter().filter(|name| ours.get(name).is_none()));
    for name in all.iter().filter(|name| *name != "groups") {
        if compared == ComparedOptions::ButRates && name == RATE {
            continue;
        }
        let [there, here] = [saved, ours].map(|it| it.get(name));
        if there != here {
            let [there, here] =
                [there, here].map(|it| it.map_or("missing".to_owned(), ToString::to_string));
            let name = name.escape_debug();
            let text = format!("{of} {name} is {there} there, and {here} here");
            wrong.push(OptionDifference { of: DifferenceOf::Option, text });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn head(kind: &str, options: Value, made_with: Option<Value>) -> OptimizerHead {
        OptimizerHead {
            kind: kind.to_owned(),
            options,
            made_with,
            updates: [].into(),
            is_open: false,
        }
    }

    fn texts(own: Value, saved: Value, compared: ComparedOptions) -> Vec<String> {
        let kind = if own.is_array() { "muon+adamw+ema" } else { "adamw" };
        let wrong = differences(&head(kind, own, None), &saved, compared);
        wrong.into_iter().map(|it| it.text).collect()
    }

    #[test]
    fn each_difference_is_named_with_both_values() {
        let group = |decay: f64, names: &str| json!({"parameters": 2, "names": names, "options": {"decay": decay}});
        let own = json!({"learning_rate": 0.1, "eps": 1e-8, "groups": [group(0.0, "a")]});
        let saved = json!({"learning_rate": 0.2, "beta": 0.5, "groups": [group(0.5, "b")]});
        let expected = [
            "adamw eps is missing there, and 1e-8 here",
            "adamw learning_rate is 0.2 there, and 0.1 here",
            "adamw beta is 0.5 there, and missing here",
            "adamw group 0 has other parameters there, also 2",
            "adamw group 0 decay is 0.5 there, and 0.0 here",
        ];
        assert_eq!(texts(own.clone(), saved.clone(), ComparedOptions::All), expected);
        let but_rates = texts(own.clone(), saved, ComparedOptions::ButRates);
        assert!(but_rates.len() == 4 && !but_rates.iter().any(|it| it.contains(RATE)));
        let without = json!({"learning_rate": 0.1, "eps": 1e-8});
        assert_eq!(
            texts(own, without, ComparedOptions::All),
            ["adamw has 0 groups there, and 1 here"]
        );
    }

    #[test]
    fn pairs_are_compared_one_by_one() {
        let own = json!([[{"momentum": 0.9}, {"eps": 1e-8}], {"decay": 0.99}]);
        let saved = json!([[{"momentum": 0.9}, {"eps": 1e-6}], {"decay": 0.5}]);
        let expected =
            ["adamw eps is 1e-6 there, and 1e-8 here", "ema decay is 0.5 there, and 0.99 here"];
        assert_eq!(texts(own.clone(), saved, ComparedOptions::All), expected);
        let torn = texts(own, json!({"eps": 1e-8}), ComparedOptions::All);
        assert_eq!(torn, ["muon+adamw+ema has options of 1 optimizers there, and of 3 here"]);
        let own = json!([{"momentum": 0.9}, [{"eps": 1e-8}, {"decay": 0.99}]]);
        let saved = json!([{"momentum": 0.9}, [{"eps": 1e-6}, {"decay": 0.5}]]);
        assert_eq!(texts(own, saved, ComparedOptions::All), expected);
    }
}
