//! The times as a picture: over memory on the left, over slow links on the right.

use std::error::Error;
use std::time::Duration;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::measure::{Mode, Row};
use crate::options::Options;

/// Colors of the modes, in their order.
const COLORS: [RGBColor; 4] = [BLUE, RED, RGBColor(0, 130, 60), RGBColor(200, 120, 0)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// One of the two halves.
struct Half<'a> {
    title: &'a str,
    time: fn(&Row) -> Duration,
}

/// Draws the time of a step in each mode against the number of microbatches, as SVG.
pub(crate) fn draw(options: &Options, rows: &[Row]) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    draw_into(&mut svg, options, rows)?;
    Ok(svg)
}

fn draw_into(svg: &mut String, options: &Options, rows: &[Row]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, (960, 400)).into_drawing_area();
    area.fill(&WHITE)?;
    let slow = format!("links of {}, injected", options.words());
    let halves = [
        Half { title: "links as fast as memory", time: |row| row.memory },
        Half { title: &slow, time: |row| row.slow },
    ];
    let longest = rows.iter().flat_map(|row| [row.memory, row.slow]).max().unwrap_or_default();
    for (area, half) in area.split_evenly((1, 2)).iter().zip(halves) {
        draw_half(area, &half, rows, longest)?;
    }
    area.present()?;
    Ok(())
}

/// Draws a half of the picture. `longest` is the end of the scale, which both halves share.
fn draw_half(
    area: &Area<'_>,
    half: &Half<'_>,
    rows: &[Row],
    longest: Duration,
) -> Result<(), Box<dyn Error>> {
    let ms = |row: &Row| (half.time)(row).as_secs_f64() * 1e3;
    let most = rows.iter().map(|row| row.microbatches).max().unwrap_or(1);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(half.title, ("sans-serif", 13))
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(0..most + 1, 0.0..longest.as_secs_f64() * 1.05e3)?;
    chart
        .configure_mesh()
        .x_desc("microbatches of a step")
        .y_desc("a step, ms")
        .y_label_formatter(&|ms| format!("{ms:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (mode, color) in Mode::ALL.into_iter().zip(COLORS) {
        let of_mode = rows.iter().filter(|row| row.mode == mode);
        let points: Vec<_> = of_mode.map(|row| (row.microbatches, ms(row))).collect();
        let marks = points.iter().map(|point| Circle::new(*point, 3, color.filled()));
        chart.draw_series(marks)?;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
            .label(mode.to_string())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(TRANSPARENT)
        .draw()?;
    Ok(())
}
