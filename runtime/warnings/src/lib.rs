//! Warnings of hsdp's libraries, which are printed to stderr if no `tracing` subscriber receives
//! them.
//!
//! [`warn!`] and [`error!`] emit `tracing` events. If neither the thread nor the process has a
//! subscriber, the event is also a line on stderr, once for each text:
//!
//! ```text
//! hsdp: warning: ranks are late (rank: 0, step: 7)
//! ```
//!
//! To receive the warnings itself, a program installs a subscriber, and to turn the lines off it
//! calls [`silence_warnings`]. This crate installs no subscriber, so a program can always do so. A
//! line that stderr cannot accept is dropped. A closed stderr is ignored. A reader that blocks
//! delays the first warning by a second, and later ones not at all.

#![forbid(unsafe_code)]

mod line;
mod plain;
mod shown;
mod stderr;
mod warning;

use std::sync::atomic::{AtomicBool, Ordering};

use tracing::dispatcher;
use tracing::subscriber::NoSubscriber;

pub use self::line::{cut, in_one_line};
pub use self::warning::Warning;

#[doc(hidden)]
pub use self::{plain::PlainField, shown::show};
#[doc(hidden)]
pub use tracing;

static SILENCED: AtomicBool = AtomicBool::new(false);

/// Turns off the lines that warnings of hsdp write to stderr without a `tracing` subscriber. The
/// events remain: a subscriber receives them as before.
pub fn silence_warnings() {
    SILENCED.store(true, Ordering::Relaxed);
}

/// Returns whether a warning of this thread should be a line on stderr.
#[doc(hidden)]
#[must_use]
pub fn is_unheard() -> bool {
    !SILENCED.load(Ordering::Relaxed)
        && dispatcher::get_default(|subscriber| subscriber.is::<NoSubscriber>())
}

/// Emits a warning: a `tracing` event of the level WARN, or without a subscriber a line on stderr.
///
/// Accepts fields and a message as `tracing::warn!` does: `name`, `%name`, `?name`, `name = value`,
/// `name = %value` and `name = ?value`, followed by a format string with its arguments.
///
/// ```
/// let step = 7;
/// let free = 12.5;
/// hsdp_warnings::warn!(step, free = ?free, "the disk is nearly full");
/// // On stderr: `hsdp: warning: the disk is nearly full (step: 7, free: 12.5)`
/// ```
#[macro_export]
macro_rules! warn {
    ($($event:tt)+) => { $crate::__emit!(WARN, $($event)+) };
}

/// Emits an error that no caller receives. Works as [`warn!`] does, with the level ERROR.
#[macro_export]
macro_rules! error {
    ($($event:tt)+) => { $crate::__emit!(ERROR, $($event)+) };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __emit {
    ($level:ident, $($event:tt)+) => {{
        let is_unheard = $crate::is_unheard();
        $crate::tracing::event!($crate::tracing::Level::$level, $($event)+);
        if is_unheard {
            let mut warning =
                $crate::Warning::new($crate::tracing::Level::$level, ::core::module_path!());
            $crate::__record!(warning, $($event)+);
            $crate::show(&warning);
        }
    }};
}

#[doc(hidden)]
#[macro_export]
macro_rules! __record {
    ($warning:ident, %$name:ident, $($rest:tt)+) => {
        $crate::__record!($warning, $name = %$name, $($rest)+)
    };
    ($warning:ident, ?$name:ident, $($rest:tt)+) => {
        $crate::__record!($warning, $name = ?$name, $($rest)+)
    };
    ($warning:ident, $name:ident, $($rest:tt)+) => {
        $crate::__record!($warning, $name = $name, $($rest)+)
    };
    ($warning:ident, $name:ident = %$value:expr, $($rest:tt)+) => {
        $warning.add(::core::stringify!($name), &::core::format_args!("{}", $value));
        $crate::__record!($warning, $($rest)+)
    };
    ($warning:ident, $name:ident = ?$value:expr, $($rest:tt)+) => {
        $warning.add(::core::stringify!($name), &::core::format_args!("{:?}", $value));
        $crate::__record!($warning, $($rest)+)
    };
    ($warning:ident, $name:ident = $value:expr, $($rest:tt)+) => {
        $crate::PlainField::add_to(&$value, ::core::stringify!($name), &mut $warning);
        $crate::__record!($warning, $($rest)+)
    };
    ($warning:ident, $($message:tt)+) => {
        $warning.add("message", &::core::format_args!($($message)+))
    };
}
