//! Headers of safetensors files: encoding, and decoding of untrusted files.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::bounds;
use crate::error::Error;
use crate::files::FileSource;
use crate::name::RESERVED;

/// The bytes at the beginning of a file that hold the length of its header.
pub(crate) const LENGTH_BYTES: usize = 8;

/// The most bytes of a header, by the definition of the format.
pub(crate) const MOST_BYTES: u64 = 100_000_000;

/// The first bytes of a file with these tensors, in this order: the header's length, and the header.
///
/// # Errors
/// [`Error::Tensor`] if two tensors have one name, or sizes do not match.
pub(crate) fn encode(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, Error> {
    let mut names: Vec<&str> = tensors.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::tensor(twice[0], "a file has it twice; names must be unique"));
    }
    let refused = |problem: String| Error::tensor("", problem);
    let metadata = Metadata::new(None, tensors).map_err(|error| refused(error.to_string()))?;
    let json = serde_json::to_vec(&metadata).map_err(|error| refused(error.to_string()))?;
    let padded = json.len().next_multiple_of(LENGTH_BYTES);
    let mut header = (padded as u64).to_le_bytes().to_vec();
    header.extend(json);
    header.resize(LENGTH_BYTES + padded, b' ');
    Ok(header)
}

/// Reads the header of a file: the byte at which its data begins, and its tensors.
///
/// # Errors
/// [`Error::Io`]; [`Error::Manifest`] if the header is invalid; [`Error::Truncated`] if the file has another size than the header
/// says.
pub(crate) fn decode(path: &Path, source: &dyn FileSource) -> Result<(u64, Metadata), Error> {
    let size = source.size().map_err(Error::io("get the size of", path))?;
    let mut length = [0; LENGTH_BYTES];
    source.read_at(0, &mut length).map_err(Error::io("read", path))?;
    let length = u64::from_le_bytes(length);
    let data = length.checked_add(LENGTH_BYTES as u64).filter(|data| *data <= size);
    let Some(data) = data.filter(|_| length <= MOST_BYTES) else {
        let problem = format!("its header would have {length} bytes, and the file has {size}");
        return Err(Error::manifest(path, problem));
    };
    let mut header = vec![0; usize::try_from(data).map_err(|error| Error::manifest(path, error))?];
    source.read_at(0, &mut header).map_err(Error::io("read", path))?;
    let metadata = parsed(&header[LENGTH_BYTES..]).map_err(|error| Error::manifest(path, error))?;
    match data.checked_add(metadata.data_len() as u64) {
        Some(want) if want == size => Ok((data, metadata)),
        Some(want) => Err(Error::Truncated { path: path.to_owned(), got: size, want }),
        None => Err(Error::manifest(path, "the size in its header does not fit 64 bits")),
    }
}

/// The tensors of a header, in the order of their data. The `safetensors` crate checks that they cover the data exactly.
fn parsed(json: &[u8]) -> serde_json::Result<Metadata> {
    let HeaderTensors(tensors) = serde_json::from_slice(json)?;
    let mut tensors: Vec<(String, TensorInfo)> = tensors.into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Metadata::new(None, tensors).map_err(serde_json::Error::custom)
}

/// The tensors of a header, by name. The parser of the `safetensors` crate holds every value of the text in memory at first, which
/// may take 30 times the bytes of the text.
struct HeaderTensors(BTreeMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for HeaderTensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TensorsVisitor)
    }
}

struct TensorsVisitor;

impl<'de> Visitor<'de> for TensorsVisitor {
    type Value = HeaderTensors;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<HeaderTensors, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut has_metadata = false;
        while let Some(name) = entries.next_key::<String>()? {
            if name != RESERVED {
                let Info { dtype, shape, data_offsets } = entries.next_value()?;
                bounds::insert(&mut tensors, name, TensorInfo { dtype, shape, data_offsets })?;
            } else if has_metadata {
                return Err(A::Error::duplicate_field(RESERVED));
            } else {
                has_metadata = true;
                entries.next_value::<Option<Texts>>()?;
            }
        }
        Ok(HeaderTensors(tensors))
    }
}

/// The entry of a tensor in a header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: Dtype,
    #[serde(deserialize_with = "bounds::shape")]
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The metadata of a header: a map from texts to texts, which this crate does not need.
struct Texts;

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from texts to texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Texts, A::Error> {
        while entries.next_entry::<String, String>()?.is_some() {}
        Ok(Texts)
    }
}
