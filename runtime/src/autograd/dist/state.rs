//! The states of a value along an axis.

use std::fmt;

/// The state of a value along an axis, as a value. As a type it is a [`State`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AxisState {
    /// All ranks hold the same, and each uses it in its own way.
    Replicate,
    /// All ranks hold the same and use it in the same way: it counts once.
    Invariant,
    /// Each rank holds a value of its own.
    Varying,
    /// Each rank holds a term of a sum that is still to be made.
    Partial,
}

impl AxisState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Replicate, Self::Invariant, Self::Varying, Self::Partial];

    /// The state of the cotangents of a value in this state.
    #[must_use]
    pub const fn cotangent(self) -> Self {
        match self {
            Self::Replicate => Self::Partial,
            Self::Partial => Self::Replicate,
            alike => alike,
        }
    }

    /// The state's name, with its article.
    pub(super) const fn one(self) -> &'static str {
        match self {
            Self::Replicate => "a Replicate",
            Self::Invariant => "an Invariant",
            Self::Varying => "a Varying",
            Self::Partial => "a Partial",
        }
    }
}

impl fmt::Display for AxisState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Replicate => "Replicate",
            Self::Invariant => "Invariant",
            Self::Varying => "Varying",
            Self::Partial => "Partial",
        })
    }
}

/// A state as a type: [`Replicate`], [`Invariant`], [`Varying`] or [`Partial`]. Sealed.
pub trait State: sealed::Sealed + Copy + fmt::Debug {
    /// The state as a value.
    const STATE: AxisState;

    /// The state of its cotangents.
    type Cotangent: State;
}

mod sealed {
    #[expect(unnameable_types, reason = "it seals `State`")]
    pub trait Sealed {}
}

macro_rules! states {
    ($($(#[$doc:meta])+ $state:ident: $cotangent:ident;)+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $state;

        impl sealed::Sealed for $state {}

        impl State for $state {
            const STATE: AxisState = AxisState::$state;
            type Cotangent = $cotangent;
        }
    )+};
}

states! {
    /// All ranks hold the same, and each uses it in its own way, so that cotangents add up.
    Replicate: Partial;
    /// All ranks hold the same and use it in the same way: it counts once.
    Invariant: Invariant;
    /// Each rank holds a value of its own.
    Varying: Varying;
    /// Each rank holds a term of a sum that is still to be made.
    Partial: Replicate;
}
