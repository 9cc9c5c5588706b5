//! Folders of Hugging Face models: whole tensors in `model-00001-of-00003.safetensors`, and an
//! index that says which tensor is in which file.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::bounds;
use crate::error::{Error, listed};
use crate::files::{FileSource, Files, ReadFiles, directory_of, read_whole, write_synced};
use crate::generation::Generation;
use crate::hash::Hash;
use crate::header;
use crate::name::{STATE, is_plain, nonce, state_tensor, unfinished};
use crate::tensors::TensorEntry;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Elements that are read and converted at a time.
const BLOCK: usize = 1 << 16;

/// The most bytes of an index: 600,000 tensors.
const MOST_INDEX_BYTES: u64 = 64 << 20;

/// The content of the index file.
#[derive(Debug, Serialize)]
struct Index {
    metadata: BTreeMap<String, serde_json::Value>,
    weight_map: BTreeMap<String, String>,
}

/// The part of the index file that a reader needs.
#[derive(Debug, Deserialize)]
struct FileOf<'a> {
    #[serde(deserialize_with = "bounds::unique")]
    weight_map: BTreeMap<String, String>,
    /// Any JSON: its writers differ in what they put here.
    #[serde(borrow, default)]
    metadata: Option<&'a RawValue>,
}

/// The size that an index states for the tensors of all its files, as text.
#[derive(Debug, Deserialize)]
struct StatedSize<'a> {
    #[serde(borrow)]
    total_size: &'a RawValue,
}

/// The counts of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The number of files with tensors.
    pub files: usize,
    /// The number of tensors.
    pub tensors: usize,
    /// The bytes of all tensors.
    pub bytes: u64,
}

/// The values of the parameters in an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Those that were trained.
    Trained,
    /// Their exponential moving averages, in f32: the tensors of state `ema`. A parameter that has
    /// none, since it is frozen, has its own values.
    Average,
}

/// Writes the parameters of a generation as a new folder. A file has at most `most` bytes of
/// tensors, or a single tensor. Holds at most one chunk in memory. The folder gets its name after
/// all of it is synced.
///
/// # Errors
/// [`Error::Io`], also if the folder exists already; [`Error::Corrupt`] if a hash differs;
/// [`Error::Manifest`] if averages are wanted and the generation has none.
pub fn export(
    generation: &Generation,
    files: &dyn Files,
    folder: &Path,
    weights: Weights,
    most: u64,
) -> Result<Exported, Error> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    // An export that was killed leaves its folder behind: the next one has another name for its
    // own.
    let writing = folder.with_file_name(unfinished(&name, nonce()));
    if folder.exists() {
        let exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(Error::io("make", folder)(exists));
    }
    let parts = split(generation, weights, most)?;
    let above = directory_of(folder);
    files.create_dir(&writing).map_err(Error::io("make", &writing))?;
    let written = write(generation, files, &writing, &parts);
    let published = written.and_then(|exported| {
        files.rename(&writing, folder).map_err(Error::io("rename", &writing))?;
        if let Err(error) = files.sync_dir(above) {
            // The export fails, so the folder must not stay.
            drop(files.rename(folder, &writing));
            return Err(Error::io("sync", above)(error));
        }
        Ok(exported)
    });
    published.inspect_err(|_| drop(files.remove(&writing)))
}

fn write(
    generation: &Generation,
    files: &dyn Files,
    folder: &Path,
    parts: &[Vec<ExportedTensor<'_>>],
) -> Result<Exported, Error> {
    let count = parts.len();
    let mut index = Index { metadata: BTreeMap::new(), weight_map: BTreeMap::new() };
    let mut bytes = 0;
    for (part, tensors) in parts.iter().enumerate() {
        let name = match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", part + 1),
        };
        bytes += write_file(generation, files, &folder.join(&name), tensors)?;
        let named = tensors.iter().map(|tensor| (tensor.name.to_owned(), name.clone()));
        index.weight_map.extend(named);
    }
    let tensors = index.weight_map.len();
    index.metadata.insert("total_size".to_owned(), bytes.into());
    let path = folder.join(INDEX);
    let text = serde_json::to_vec_pretty(&index).map_err(|error| Error::manifest(&path, error))?;
    write_synced(files, &path, |write| write(&text))?;
    files.sync_dir(folder).map_err(Error::io("sync", folder))?;
    Ok(Exported { files: count, tensors, bytes })
}

/// A tensor of a folder.
struct ExportedTensor<'a> {
    name: &'a str,
    /// The name of the tensor with its values in the generation.
    source: &'a str,
    entry: &'a TensorEntry,
}

/// The tensors of each file, in order of name. There is at least one file.
type Parts<'a> = Vec<Vec<ExportedTensor<'a>>>;

/// Puts tensors into files.
fn split(generation: &Generation, weights: Weights, most: u64) -> Result<Parts<'_>, Error> {
    let mut parts: Parts<'_> = vec![Vec::new()];
    let mut held = 0;
    for tensor in tensors_of(generation, weights)? {
        let bytes = bytes_of(tensor.name, tensor.entry)?;
        if held > 0 && held + bytes > most {
            parts.push(Vec::new());
            held = 0;
        }
        held += bytes;
        parts.last_mut().expect("there is one").push(tensor);
    }
    Ok(parts)
}

/// All tensors of a folder, in order of name.
fn tensors_of<'g>(
    generation: &'g Generation,
    weights: Weights,
) -> Result<Vec<ExportedTensor<'g>>, Error> {
    let tensors = &generation.manifest().tensors;
    let params = tensors.iter().filter(|(name, _)| !name.starts_with(STATE));
    let average = |name| tensors.get_key_value(&state_tensor("ema", name));
    let source = |name| if weights == Weights::Average { average(name) } else { None };
    let tensor = |(name, own): (&'g String, &'g TensorEntry)| {
        let (source, entry) = source(name).unwrap_or((name, own));
        ExportedTensor { name, source, entry }
    };
    let all: Vec<_> = params.map(tensor).collect();
    if weights == Weights::Average && all.iter().all(|tensor| tensor.name == tensor.source) {
        let problem = "the checkpoint has no averages: none of its tensors is named \
                       `optimizer:ema:<parameter>`";
        return Err(Error::manifest(generation.path(), problem));
    }
    Ok(all)
}

fn bytes_of(name: &str, tensor: &TensorEntry) -> Result<u64, Error> {
    let bytes =
        tensor.numel().zip(tensor.element_bytes()).and_then(|(n, size)| n.checked_mul(size));
    bytes.ok_or_else(|| Error::tensor(name, "its size does not fit 64 bits"))
}

/// Writes a file. Returns the bytes of its tensors.
fn write_file(
    generation: &Generation,
    files: &dyn Files,
    path: &Path,
    tensors: &[ExportedTensor<'_>],
) -> Result<u64, Error> {
    let mut at = 0;
    let mut infos = Vec::new();
    for ExportedTensor { name, entry, .. } in tensors {
        let size =
            |size: &u64| usize::try_from(*size).map_err(|_| Error::tensor(name, "it is too large"));
        let shape = entry.shape.iter().map(size).collect::<Result<_, _>>()?;
        let end = at + size(&bytes_of(name, entry)?)?;
        let info = TensorInfo { dtype: entry.dtype, shape, data_offsets: (at, end) };
        infos.push(((*name).to_owned(), info));
        at = end;
    }
    let beginning = header::encode(infos)?;
    write_synced(files, path, |write| {
        write(&beginning)?;
        tensors.iter().try_for_each(|it| generation.for_each_chunk(it.source, &mut *write))
    })?;
    Ok(at as u64)
}

/// A folder with a Hugging Face model. Its headers have been read.
#[derive(Debug)]
pub struct Folder {
    files: Arc<dyn ReadFiles>,
    /// By name.
    tensors: BTreeMap<String, TensorPlace>,
    /// Contradictions that change no tensor, in words.
    oddities: Vec<String>,
}

/// The position of a tensor in a file.
#[derive(Clone, Debug)]
struct TensorPlace {
    path: Arc<Path>,
    dtype: Dtype,
    shape: Vec<u64>,
    begin: u64,
}

/// Bytes of each part of a sample.
const SAMPLE: usize = 1024;

impl TensorPlace {
    /// Returns the hash of the first, the middle and the last bytes of the tensor.
    fn sample(&self, source: &dyn FileSource) -> Result<Hash, Error> {
        let bytes = self.shape.iter().product::<u64>() * self.dtype.bitsize() as u64 / 8;
        let part = bytes.min(SAMPLE as u64);
        let mut hasher = blake3::Hasher::new();
        let mut block = [0; SAMPLE];
        let block = &mut block[..usize::try_from(part).unwrap_or(SAMPLE)];
        for from in [0, (bytes - part) / 2, bytes - part] {
            let read = source.read_at(self.begin + from, block);
            read.map_err(Error::io("read", &self.path))?;
            hasher.update(block);
        }
        Ok(Hash::finish(&hasher))
    }
}

impl Folder {
    /// Reads the headers of a folder, and its index if there is one. As transformers does, it reads
    /// `model.safetensors` where that is there, and the files of `model.safetensors.index.json`
    /// only where it is not.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Manifest`] if the folder has weights in another form only, the index
    /// or a header is invalid or too large, two files have a tensor of one name, or a file that the
    /// index names is missing or has not the tensors that it should; [`Error::Truncated`] if a file
    /// has another size than its header says.
    pub fn open(files: Arc<dyn ReadFiles>, folder: &Path) -> Result<Self, Error> {
        let paths = files.list(folder).map_err(Error::io("list", folder))?;
        let names: BTreeSet<&str> =
            paths.iter().filter_map(|path| path.file_name().and_then(OsStr::to_str)).collect();
        let mut found = FolderScan::default();
        match Layout::of(&names).map_err(|problem| Error::manifest(folder, problem))? {
            Layout::Single { unread } => {
                found.add_file(&*files, &folder.join(SINGLE))?;
                found.oddities.extend(unread_files(&unread));
            }
            Layout::Indexed => found.add_indexed(&*files, folder, &names)?,
        }
        Ok(Self { files, tensors: found.tensors, oddities: found.oddities })
    }

    /// Returns a text for each contradiction in the folder that changes no tensor: files that are
    /// not read because `model.safetensors` is there, an index whose `total_size` is not that of
    /// its files, or an index that lacks some of their tensors.
    #[must_use]
    pub fn oddities(&self) -> &[String] {
        &self.oddities
    }

    /// Returns the dtype of a tensor's elements in its file.
    #[must_use]
    pub fn dtype(&self, tensor: &str) -> Option<Dtype> {
        self.tensors.get(tensor).map(|place| place.dtype)
    }

    /// The names of all tensors, with their shapes.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[u64])> {
        self.tensors.iter().map(|(name, place)| (&**name, &*place.shape))
    }

    /// Describes the content of the folder: a line for each tensor, with its dtype, its shape, its
    /// place in its file, and a hash of a sample of its elements: the first, the middle and the
    /// last 1,024 bytes. Folders of one model and version have the same lines, wherever they are.
    /// Other values of a tensor are seen if they differ in the sample.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn contents(&self) -> Result<Vec<String>, Error> {
        let mut places: Vec<(&String, &TensorPlace)> = self.tensors.iter().collect();
        places.sort_by(|(_, one), (_, other)| {
            (&one.path, one.begin).cmp(&(&other.path, other.begin))
        });
        let mut lines = Vec::with_capacity(places.len());
        for of_file in places.chunk_by(|(_, one), (_, next)| one.path == next.path) {
            let path = &of_file[0].1.path;
            let source = self.files.open(path).map_err(Error::io("open", path))?;
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            for (name, place) in of_file {
                let TensorPlace { dtype, shape, begin, .. } = place;
                let sample = place.sample(&*source)?;
                let name = name.escape_debug();
                let file = file.escape_debug();
                lines.push(format!(
                    "tensor `{name}`, {dtype} {shape:?} at byte {begin} of {file}, with a sample \
                     of hash {sample}"
                ));
            }
        }
        Ok(lines)
    }

    /// Fills `values` with elements of a tensor as f32, beginning at element `offset` in row-major
    /// order. Reads only those bytes of the file. F32, F16 and BF16 are converted exactly; F64 is
    /// rounded.
    ///
    /// # Errors
    /// [`Error::Tensor`] if there is no such tensor, its dtype is another one, or it ends before
    /// `values` is full; [`Error::Io`].
    pub fn read(&self, tensor: &str, offset: u64, values: &mut [f32]) -> Result<(), Error> {
        let TensorPlace { path, dtype, shape, begin } = self.place(tensor)?;
        let convert = converter(*dtype).ok_or_else(|| {
            Error::tensor(tensor, format!("its elements are {dtype}, not floats"))
        })?;
        let numel: u64 = shape.iter().product();
        if offset.checked_add(values.len() as u64).is_none_or(|end| end > numel) {
            let problem =
                format!("{} elements from {offset} exceed its shape {shape:?}", values.len());
            return Err(Error::tensor(tensor, problem));
        }
        let source = self.files.open(path).map_err(Error::io("open", path))?;
        let size = dtype.bitsize() / 8;
        let mut at = begin + offset * size as u64;
        let mut bytes = vec![0; BLOCK.min(values.len()) * size];
        for values in values.chunks_mut(BLOCK) {
            let bytes = &mut bytes[..values.len() * size];
            source.read_at(at, bytes).map_err(Error::io("read", path))?;
            convert(bytes, values);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Reads a whole tensor as f32, in row-major order.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read), and [`Error::Tensor`] if the tensor has another shape.
    pub fn read_whole(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let place = self.place(tensor)?;
        if !shape.iter().map(|size| *size as u64).eq(place.shape.iter().copied()) {
            let problem = format!("it has shape {:?}, not {shape:?}", place.shape);
            return Err(Error::tensor(tensor, problem));
        }
        let mut values = vec![0.0; shape.iter().product()];
        self.read(tensor, 0, &mut values)?;
        Ok(values)
    }

    fn place(&self, tensor: &str) -> Result<&TensorPlace, Error> {
        let place = self.tensors.get(tensor);
        place.ok_or_else(|| Error::tensor(tensor, "the folder has no tensor of that name"))
    }
}

/// The files in which a folder has its tensors.
enum Layout<'n> {
    /// `model.safetensors`. The index and its files beside it are not read.
    Single { unread: Vec<&'n str> },
    /// The files that the index names.
    Indexed,
}

impl<'n> Layout<'n> {
    /// Chooses by the names of a folder's files.
    ///
    /// # Errors
    /// If there are weights in other forms only: what they are, in words.
    fn of(names: &BTreeSet<&'n str>) -> Result<Self, String> {
        if names.contains(SINGLE) {
            let beside = names.iter().copied().filter(|name| is_part(name));
            return Ok(Self::Single { unread: beside.collect() });
        }
        if names.contains(INDEX) {
            return Ok(Self::Indexed);
        }
        match other_form(names) {
            Some(problem) => Err(problem),
            // Opening the file that should be there has the error.
            None => Ok(Self::Single { unread: Vec::new() }),
        }
    }
}

/// Returns whether a file is one of several that an index names, by its usual name:
/// `model-00001-of-00003.safetensors`.
fn is_part(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    numbers
        .and_then(|numbers| numbers.split_once("-of-"))
        .is_some_and(|(part, count)| is_number(part) && is_number(count))
}

/// Describes the weights of a folder that has neither `model.safetensors` nor an index. `None` if
/// it has none.
fn other_form(names: &BTreeSet<&str>) -> Option<String> {
    let which = |is: &dyn Fn(&str) -> bool| {
        let files: Vec<String> = names
            .iter()
            .filter(|name| is(name))
            .map(|name| name.escape_debug().to_string())
            .collect();
        (!files.is_empty()).then(|| listed(&files, ", "))
    };
    let ends = |endings: &'static [&'static str]| {
        move |name: &str| endings.iter().any(|ending| name.ends_with(ending))
    };
    if let Some(parts) = which(&is_part) {
        return Some(format!(
            "it has parts of a model ({parts}) without {INDEX}, which says what they should hold"
        ));
    }
    if let Some(adapters) = which(&|name| name.starts_with("adapter_")) {
        return Some(format!(
            "it has adapters alone ({adapters}), and no {SINGLE}: merge them into their model first"
        ));
    }
    if let Some(other) = which(&ends(&[".safetensors"])) {
        return Some(format!("it has no {SINGLE} and no {INDEX}; {other} is not read"));
    }
    let pickled = which(&ends(&[".bin", ".bin.index.json", ".pth", ".pt", ".ckpt"]));
    let converted = which(&ends(&[".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz"]));
    let (form, files) = match (pickled, converted) {
        (Some(files), _) => ("pickled by PyTorch", files),
        (None, Some(files)) => ("in another format", files),
        (None, None) => return None,
    };
    Some(format!(
        "its weights are {form} ({files}), and only safetensors are read: save the model anew, by \
         `save_pretrained` of transformers, say"
    ))
}

/// Tells of the files that are not read beside `model.safetensors`.
fn unread_files(unread: &[&str]) -> Option<String> {
    let (first, rest) = unread.split_first()?;
    let more = match rest.len() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    Some(format!("{first}{more} is not read, since {SINGLE} is there"))
}

/// The files of a folder that have been read so far.
#[derive(Default)]
struct FolderScan {
    tensors: BTreeMap<String, TensorPlace>,
    header_bytes: u64,
    /// The bytes of all tensors.
    bytes: u64,
    oddities: Vec<String>,
}

impl FolderScan {
    /// Adds the files that the index names, of the files `names` that the folder has.
    fn add_indexed(
        &mut self,
        files: &dyn ReadFiles,
        folder: &Path,
        names: &BTreeSet<&str>,
    ) -> Result<(), Error> {
        let index = &folder.join(INDEX);
        let text = read_whole(files, index, MOST_INDEX_BYTES).map_err(Error::io("read", index))?;
        let FileOf { weight_map, metadata } =
            serde_json::from_slice(&text).map_err(|error| Error::manifest(index, error))?;
        let in_files: BTreeSet<&String> = weight_map.values().collect();
        for name in in_files {
            if !is_plain(name) {
                let name = name.escape_debug();
                return Err(Error::manifest(index, format!("`{name}` is not a valid file name")));
            }
            if !names.contains(&**name) {
                let problem = format!("it names {name}, which is not in the folder");
                return Err(Error::manifest(index, problem));
            }
            self.add_file(files, &folder.join(name))?;
        }
        for (tensor, file) in &weight_map {
            let place = self.tensors.get(tensor);
            if place.is_none_or(|place| place.path.file_name() != Some(OsStr::new(file))) {
                let tensor = tensor.escape_debug();
                return Err(Error::manifest(index, format!("`{tensor}` is not in {file}")));
            }
        }
        self.oddities.extend(self.unlisted(&weight_map));
        self.oddities.extend(self.misstated(metadata));
        Ok(())
    }

    /// Tells of tensors in the index's files that the index lacks. As transformers does, they are
    /// read.
    fn unlisted(&self, weight_map: &BTreeMap<String, String>) -> Option<String> {
        let mut unlisted = self.tensors.keys().filter(|name| !weight_map.contains_key(*name));
        let first = unlisted.next()?.escape_debug();
        let more = match unlisted.count() {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        Some(format!("tensor `{first}`{more} of its files is not in {INDEX}, and is read"))
    }

    /// Tells of a total size in the index's metadata that is not that of its files.
    fn misstated(&self, metadata: Option<&RawValue>) -> Option<String> {
        let StatedSize { total_size } = serde_json::from_str(metadata?.get()).ok()?;
        let stated: f64 = total_size.get().parse().ok()?;
        #[expect(clippy::cast_precision_loss, reason = "a size is below 2^53")]
        let is_right = stated == self.bytes as f64;
        let bytes = self.bytes;
        (!is_right).then(|| {
            format!(
                "the total_size of {INDEX} is {stated}, and its files have {bytes} bytes of tensors"
            )
        })
    }

    /// Adds the tensors of a file.
    fn add_file(&mut self, files: &dyn ReadFiles, path: &Path) -> Result<(), Error> {
        let source = files.open(path).map_err(Error::io("open", path))?;
        let (data, metadata) = header::decode(path, &*source)?;
        self.header_bytes += data;
        if self.header_bytes > header::MOST_BYTES {
            let problem = format!(
                "the headers up to this file have {} bytes, more than {}",
                self.header_bytes,
                header::MOST_BYTES
            );
            return Err(Error::manifest(path, problem));
        }
        let path: Arc<Path> = path.into();
        for (name, info) in metadata.tensors() {
            let begin = data + info.data_offsets.0 as u64;
            self.bytes += (info.data_offsets.1 - info.data_offsets.0) as u64;
            let shape = info.shape.iter().map(|size| *size as u64).collect();
            let place = TensorPlace { path: Arc::clone(&path), dtype: info.dtype, shape, begin };
            if let Some(other) = self.tensors.insert(name.clone(), place) {
                let name = name.escape_debug();
                let other = other.path.display();
                return Err(Error::manifest(&path, format!("`{name}` is also in {other}")));
            }
        }
        Ok(())
    }
}

/// Converts little-endian elements to f32.
type Converter = fn(&[u8], &mut [f32]);

/// Returns the conversion from little-endian elements of a dtype to f32; `None` for dtypes that are
/// not converted.
fn converter(dtype: Dtype) -> Option<Converter> {
    fn by<const SIZE: usize>(bytes: &[u8], values: &mut [f32], convert: fn([u8; SIZE]) -> f32) {
        let elements = bytes.as_chunks::<SIZE>().0;
        values.iter_mut().zip(elements).for_each(|(value, element)| *value = convert(*element));
    }
    #[expect(clippy::cast_possible_truncation, reason = "the rounding that is promised")]
    fn rounded(bytes: [u8; 8]) -> f32 {
        f64::from_le_bytes(bytes) as f32
    }
    Some(match dtype {
        Dtype::F32 => |bytes, values| by(bytes, values, f32::from_le_bytes),
        Dtype::F16 => |bytes, values| by(bytes, values, |it| f16::from_le_bytes(it).to_f32()),
        Dtype::BF16 => |bytes, values| by(bytes, values, |it| bf16::from_le_bytes(it).to_f32()),
        Dtype::F64 => |bytes, values| by(bytes, values, rounded),
        _ => return None,
    })
}
