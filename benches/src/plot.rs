//! The picture that `--plot` asks for.

use std::error::Error;
use std::path::Path;

use hsdp_train::Failure;
use hsdp_train::file::Output;

/// The file of a picture, if one is wanted. It is checked before the measurement.
#[derive(Debug)]
pub struct Plot(Option<Output>);

impl Plot {
    /// Checks that the file can be written.
    ///
    /// # Errors
    /// [`Failure::Input`]
    pub fn check(file: Option<&Path>) -> Result<Self, Failure> {
        let checked = file.map(|file| Output::check(file, &[])).transpose();
        Ok(Self(checked.map_err(|error| Failure::Input(format!("cannot write {error}")))?))
    }

    /// Draws the picture as SVG, and writes it as a whole.
    ///
    /// # Errors
    /// [`Failure::Work`]
    pub fn write(
        &self,
        draw: impl FnOnce() -> Result<String, Box<dyn Error>>,
    ) -> Result<(), Failure> {
        let Some(output) = &self.0 else { return Ok(()) };
        let path = output.path().display();
        let svg = draw().map_err(|error| Failure::Work(format!("cannot draw {path}: {error}")))?;
        let written = output.write_all(svg);
        written.map_err(|error| Failure::Work(format!("cannot write {error}")))
    }
}
