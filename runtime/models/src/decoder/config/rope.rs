//! Position embeddings, as `config.json` describes them.

use std::f32::consts::TAU;
use std::fmt;

use serde_json::{Map, Value, json};

use super::keys::{ConfigKeys, Effect, KeyTable, agreed};
use super::{DecoderConfigError, unsupported, wrong};

/// Rotary position embeddings of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the wavelengths.
    pub theta: f64,
    /// Scaling of the wavelengths.
    pub scaling: RopeScaling,
    /// Number of elements in a head that are rotated. The other elements pass through. As in
    /// transformers, an odd number is the base of the exponents, and one more element is rotated.
    pub rotated: usize,
}

/// Scaling of the wavelengths of position embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All wavelengths are longer by this factor.
    Linear(f64),
    /// Scaling of Llama 3. It depends on the wavelength: the whole factor, a part of it, or no
    /// scaling.
    Llama3 {
        /// Factor by which the longest wavelengths grow.
        factor: f64,
        /// Wavelengths above `original / low` are scaled by the whole factor.
        low: f64,
        /// Wavelengths below `original / high` are not scaled.
        high: f64,
        /// Length of the sequences before the scaling, in tokens.
        original: usize,
    },
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Linear(factor) => write!(f, "linear by {factor}"),
            Self::Llama3 { factor, low, high, original } => {
                write!(f, "llama3 by {factor} from {low} to {high} of {original}")
            }
        }
    }
}

/// Kind of position embeddings that transformers has for a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::decoder) enum Rotation {
    /// Wavelengths may be scaled, and a head is rotated as a whole.
    Scaled,
    /// Wavelengths are not scaled, and `partial_rotary_factor` may limit the rotation to a part of
    /// a head.
    Partial,
}

/// Keys of `rope_parameters` and of its older name `rope_scaling`, by type.
const KEYS: KeyTable =
    // `type` is the older name of `rope_type`.
    &[(Effect::Read, &["rope_type", "type", "rope_theta", "partial_rotary_factor"])];
const SCALED: KeyTable = &[(Effect::Read, &["factor"])];
const LLAMA3: KeyTable =
    &[(Effect::Read, &["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])];

/// Default of `rope_theta`.
pub(in crate::decoder) const THETA: f64 = 10_000.0;

/// Settings beside `rope_parameters`, and their defaults.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeDefaults {
    pub(super) rotation: Rotation,
    pub(super) theta: f64,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
}

/// Position embeddings found in one object.
struct FoundRope {
    name: &'static str,
    scaling: RopeScaling,
    theta: Option<f64>,
    /// Part of a head that is rotated.
    part: Option<f64>,
}

/// Reads the position embeddings. The object that describes them has two names. `rope_theta` and
/// `partial_rotary_factor` may be in it or beside it.
pub(super) fn read(
    keys: &ConfigKeys<'_>,
    beside: RopeDefaults,
) -> Result<Rope, DecoderConfigError> {
    let theta = if keys.has("rope_theta") { Some(keys.or("rope_theta", 0.0)?) } else { None };
    let part: Option<f64> = keys.optional("partial_rotary_factor")?;
    let mut read: Vec<FoundRope> = Vec::new();
    for (name, prefix) in
        [("rope_parameters", "rope_parameters."), ("rope_scaling", "rope_scaling.")]
    {
        let Some(object) = keys.object(name)? else { continue };
        let inner = ConfigKeys::of(prefix, &object);
        let scaling = scaling(&inner, prefix, beside)?;
        let own = if inner.has("rope_theta") { Some(inner.or("rope_theta", 0.0)?) } else { None };
        let in_both = |key: &str, own, beside| {
            agreed([(format!("{prefix}{key}"), own), (key.to_owned(), beside)])
        };
        let theta = in_both("rope_theta", own, theta)?;
        let own = inner.optional("partial_rotary_factor")?;
        let part = in_both("partial_rotary_factor", own, part)?;
        read.push(FoundRope { name, scaling, theta, part });
    }
    if let [one, other] = &read[..] {
        let named = |found: &FoundRope| found.name.to_owned();
        agreed([(named(one), Some(one.scaling)), (named(other), Some(other.scaling))])?;
        let of = |key: &str, found: &FoundRope, value| (format!("{key} of {}", found.name), value);
        let theta = |found| of("rope_theta", found, Some(found.theta.unwrap_or(beside.theta)));
        agreed([theta(one), theta(other)])?;
        let part = |found| of("partial_rotary_factor", found, Some(found.part.unwrap_or(1.0)));
        agreed([part(one), part(other)])?;
    }
    let first = read.into_iter().next();
    let found = first.unwrap_or(FoundRope { name: "", scaling: RopeScaling::Default, theta, part });
    Ok(Rope {
        theta: found.theta.unwrap_or(beside.theta),
        scaling: found.scaling,
        rotated: rotated(found.part.unwrap_or(1.0), beside)?,
    })
}

/// Returns the number of rotated elements in a head.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within a head")]
#[expect(clippy::cast_precision_loss, reason = "a head is narrow")]
fn rotated(part: f64, beside: RopeDefaults) -> Result<usize, DecoderConfigError> {
    const NAME: &str = "partial_rotary_factor";
    let head_dim = beside.head_dim;
    match beside.rotation {
        Rotation::Scaled if part.to_bits() != 1.0_f64.to_bits() => {
            unsupported(NAME, part.to_string(), "1")
        }
        Rotation::Scaled => Ok(head_dim),
        Rotation::Partial if !(part > 0.0 && part <= 1.0) => {
            wrong(NAME, part, "above 0 and at most 1".to_owned())
        }
        Rotation::Partial => match (head_dim as f64 * part) as usize {
            0 => wrong(NAME, part, format!("at least 1 / {head_dim}, an element of a head")),
            rotated => Ok(rotated),
        },
    }
}

/// Reads the scaling in `rope_parameters` or `rope_scaling`.
fn scaling(
    keys: &ConfigKeys<'_>,
    prefix: &str,
    beside: RopeDefaults,
) -> Result<RopeScaling, DecoderConfigError> {
    let kind: Option<String> = keys.either("rope_type", "type")?;
    let kind = kind.as_deref().unwrap_or("default");
    let (tables, required): (&[KeyTable], &[&str]) = match (kind, beside.rotation) {
        ("default", _) => (&[KEYS, SCALED], &[]),
        ("linear", Rotation::Scaled) => (&[KEYS, SCALED], &["factor"]),
        ("llama3", Rotation::Scaled) => {
            (&[KEYS, SCALED, LLAMA3], &["factor", "low_freq_factor", "high_freq_factor"])
        }
        (_, Rotation::Scaled) => {
            return unsupported("rope_type", kind.to_owned(), "default, linear or llama3");
        }
        (_, Rotation::Partial) => return unsupported("rope_type", kind.to_owned(), "default"),
    };
    keys.check(tables)?;
    let contradiction = |second: String| {
        Err(DecoderConfigError::Contradiction {
            first: format!("{prefix}rope_type is {kind}"),
            second,
        })
    };
    let number = |key| keys.optional::<f64>(key);
    for key in required {
        if number(key)?.is_none() {
            return contradiction(format!("{prefix}{key} is missing"));
        }
    }
    let factor = number("factor")?;
    match (kind, factor) {
        ("default", Some(factor)) => contradiction(format!("{prefix}factor is {factor}")),
        ("linear", Some(factor)) => Ok(RopeScaling::Linear(factor)),
        (_, Some(factor)) => Ok(RopeScaling::Llama3 {
            factor,
            low: number("low_freq_factor")?.unwrap_or_default(),
            high: number("high_freq_factor")?.unwrap_or_default(),
            original: keys
                .optional("original_max_position_embeddings")?
                .unwrap_or(beside.max_position_embeddings),
        }),
        (_, None) => Ok(RopeScaling::Default),
    }
}

impl Rope {
    /// Returns the number of rotated pairs.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.rotated.div_ceil(2)
    }

    /// Checks that the numbers make position embeddings.
    pub(super) fn check(&self) -> Result<(), DecoderConfigError> {
        let mut positive = vec![("rope_theta", self.theta)];
        match self.scaling {
            RopeScaling::Default => {}
            RopeScaling::Linear(factor) => positive.push(("factor of rope_scaling", factor)),
            RopeScaling::Llama3 { factor, low, high, original } => {
                positive.extend([
                    ("factor of rope_scaling", factor),
                    ("low_freq_factor", low),
                    ("high_freq_factor", high),
                ]);
                if high <= low {
                    return wrong("high_freq_factor", high, format!("above {low}, the low one"));
                }
                super::within("original_max_position_embeddings", original)?;
            }
        }
        super::above_0(&positive)
    }

    /// Returns the angle by which a pair turns from one position to the next. Like transformers,
    /// computes in f32 throughout.
    #[expect(clippy::cast_possible_truncation, reason = "theta and factors are numbers of f32")]
    #[expect(clippy::cast_precision_loss, reason = "a head is narrow, and a context below 2^24")]
    pub(in crate::decoder) fn frequency(&self, pair: usize) -> f32 {
        let exponent = (2 * pair) as f32 / self.rotated as f32;
        let frequency = 1.0 / (self.theta as f32).powf(exponent);
        match self.scaling {
            RopeScaling::Default => frequency,
            RopeScaling::Linear(factor) => frequency / factor as f32,
            RopeScaling::Llama3 { factor, low, high, original } => {
                let wavelength = TAU / frequency;
                let original = original as f64;
                if wavelength > (original / low) as f32 {
                    return frequency / factor as f32;
                }
                if wavelength < (original / high) as f32 {
                    return frequency;
                }
                let share = (original as f32 / wavelength - low as f32) / (high - low) as f32;
                (1.0 - share) * frequency / factor as f32 + share * frequency
            }
        }
    }

    /// Writes theta, the part of a head that is rotated, and the scaling of wavelengths where stock
    /// candle and versions of transformers before 5 read them. Stock candle refuses a linear
    /// scaling there, and would ignore the new place.
    pub(super) fn write_old(&self, json: &mut Map<String, Value>) {
        json.insert("rope_theta".to_owned(), json!(self.theta));
        let part = |name| json.get(name)?.get("partial_rotary_factor").filter(|it| !it.is_null());
        if let Some(part) = part("rope_parameters").or_else(|| part("rope_scaling")).cloned() {
            json.insert("partial_rotary_factor".to_owned(), part);
        }
        let old = match self.scaling {
            RopeScaling::Default => return,
            RopeScaling::Linear(factor) => json!({ "type": "linear", "factor": factor }),
            RopeScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }),
        };
        json.insert("rope_scaling".to_owned(), old);
    }
}
