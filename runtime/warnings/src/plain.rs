//! Values that a field accepts without a sigil.

use crate::Warning;

/// A value that `tracing` records as it is.
pub trait PlainField {
    /// Adds the value to a warning. An absent value adds no field.
    fn add_to(&self, name: &'static str, warning: &mut Warning);
}

impl<T: PlainField + ?Sized> PlainField for &T {
    fn add_to(&self, name: &'static str, warning: &mut Warning) {
        (**self).add_to(name, warning);
    }
}

impl<T: PlainField> PlainField for Option<T> {
    fn add_to(&self, name: &'static str, warning: &mut Warning) {
        if let Some(value) = self {
            value.add_to(name, warning);
        }
    }
}

macro_rules! plain {
    ($($type:ty),*) => {
        $(impl PlainField for $type {
            fn add_to(&self, name: &'static str, warning: &mut Warning) {
                warning.add(name, &self);
            }
        })*
    };
}

plain!(bool, f32, f64, i32, i64, isize, str, String, u8, u16, u32, u64, usize);
