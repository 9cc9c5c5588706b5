//! Tensors from safetensors files, by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hsdp_train::file;
use safetensors::{Dtype, SafeTensors};

use super::CaseError;

/// The most bytes of a file.
const MAX_BYTES: u64 = 256 << 20;

/// The tensors of one file, all of the same dtype.
#[derive(Debug)]
pub(super) struct TensorFile<T> {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor<T>>,
}

#[derive(Debug)]
struct Tensor<T> {
    shape: Vec<usize>,
    values: Vec<T>,
}

/// A number that files hold in four bytes, little-endian.
pub(super) trait Number: Sized {
    const DTYPE: Dtype;

    fn from_le_bytes(bytes: [u8; 4]) -> Self;
}

impl Number for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn from_le_bytes(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

impl Number for i32 {
    const DTYPE: Dtype = Dtype::I32;

    fn from_le_bytes(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

impl<T: Number> TensorFile<T> {
    /// Reads a whole file.
    pub(super) fn read(path: &Path) -> Result<Self, CaseError> {
        let bytes = file::read(path, MAX_BYTES)?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|source| CaseError::SafeTensors { path: path.into(), source })?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            if view.dtype() != T::DTYPE {
                let what = format!("{name} has dtype {:?}, expected {:?}", view.dtype(), T::DTYPE);
                return Err(CaseError::senseless(path, what));
            }
            let (words, _) = view.data().as_chunks::<4>();
            let values = words.iter().copied().map(T::from_le_bytes).collect();
            tensors.insert(name.to_owned(), Tensor { shape: view.shape().to_vec(), values });
        }
        Ok(Self { path: path.into(), tensors })
    }

    /// Takes out the values of `name`, row-major.
    ///
    /// # Errors
    /// If there is no such tensor, or it has another shape.
    pub(super) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<T>, CaseError> {
        let Some(tensor) = self.tensors.remove(name) else {
            return Err(CaseError::senseless(&self.path, format!("there is no tensor {name}")));
        };
        if tensor.shape != shape {
            let what = format!("{name} has shape {:?}, expected {shape:?}", tensor.shape);
            return Err(CaseError::senseless(&self.path, what));
        }
        Ok(tensor.values)
    }
}
