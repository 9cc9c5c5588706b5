//! The traits of a type, as constants, and the table of types that compares them.

use std::marker::PhantomData;

/// Says for a type which of the three traits it has: the inherent constant is found first, where
/// its bound holds.
pub(crate) struct Probe<T: ?Sized>(PhantomData<T>);

pub(crate) trait Absent {
    const SEND: bool = false;
    const SYNC: bool = false;
    const UNPIN: bool = false;
}

impl<T: ?Sized> Absent for Probe<T> {}

impl<T: ?Sized + Send> Probe<T> {
    pub(crate) const SEND: bool = true;
}

impl<T: ?Sized + Sync> Probe<T> {
    pub(crate) const SYNC: bool = true;
}

impl<T: ?Sized + Unpin> Probe<T> {
    pub(crate) const UNPIN: bool = true;
}

/// Whether a row lists a trait.
pub(crate) const fn lists(row: &[&str], name: &str) -> bool {
    let mut index = 0;
    while index < row.len() {
        if equal(row[index].as_bytes(), name.as_bytes()) {
            return true;
        }
        index += 1;
    }
    false
}

const fn equal(one: &[u8], other: &[u8]) -> bool {
    let mut index = 0;
    while index < one.len() && index < other.len() && one[index] == other[index] {
        index += 1;
    }
    index == one.len() && index == other.len()
}

/// Rows of `Type: the traits it has`.
macro_rules! table {
    ($rows:ident { $($type:ty: $($has:ident)*,)* }) => {
        const $rows: &[&str] = &[$(stringify!($type)),*];
        $(const _: () = {
            let row: &[&str] = &[$(stringify!($has)),*];
            assert!(Probe::<$type>::SEND == lists(row, "Send"), concat!("Send of ", stringify!($type)));
            assert!(Probe::<$type>::SYNC == lists(row, "Sync"), concat!("Sync of ", stringify!($type)));
            assert!(Probe::<$type>::UNPIN == lists(row, "Unpin"), concat!("Unpin of ", stringify!($type)));
        };)*
    };
}
