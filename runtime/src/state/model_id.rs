//! The identity of a model.

use std::sync::Arc;

/// The identity of a model in this process.
#[derive(Clone, Debug)]
pub struct ModelId(Arc<()>);

impl ModelId {
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }
}

impl PartialEq for ModelId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ModelId {}
