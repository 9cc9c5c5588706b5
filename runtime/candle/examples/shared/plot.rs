//! A plot of the loss.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::failure::Failure;
use super::progress::StepRecord;

/// Draws the loss of every step into an SVG file.
pub(crate) fn loss(file: &Path, records: &[StepRecord], item: &str) -> Result<(), Failure> {
    draw(file, records, item)
        .map_err(|error| Failure::Training(format!("cannot draw {}: {error}", file.display())))
}

fn draw(file: &Path, records: &[StepRecord], item: &str) -> Result<(), Box<dyn Error>> {
    let points = || records.iter().map(|record| (record.step as f64, record.loss));
    let highest = points().map(|(_, loss)| loss).fold(0.0, f64::max);
    let area = SVGBackend::new(file, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .caption("Loss of each step", ("sans-serif", 20))
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..records.len() as f64, 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc(format!("cross-entropy, nats a {item}"))
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.1}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    chart.draw_series(LineSeries::new(points(), BLUE.stroke_width(2)))?;
    area.present()?;
    Ok(())
}
