//! The bits do not depend on the number of threads.

use candle_core::Tensor;
use rayon::ThreadPoolBuilder;

use crate::layers::{DTYPES, LAYERS, flat};

pub(crate) fn with_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool").install(work)
}

pub(crate) fn bits(tensors: &[Tensor]) -> Vec<Vec<u32>> {
    let of = |tensor: &Tensor| flat(tensor).into_iter().map(f32::to_bits).collect();
    tensors.iter().map(of).collect()
}

#[test]
fn one_thread_and_four_give_the_same_bits() {
    for layer in &LAYERS {
        for (dtype, candle) in DTYPES {
            let (inputs, g) = layer.large(candle);
            let run = || bits(&layer.run(layer.fused, &inputs, &g));
            let one = with_threads(1, run);
            let four = with_threads(4, run);
            assert_eq!(one, four, "{} in {dtype}", layer.name);
            assert_eq!(four, with_threads(3, run), "{} in {dtype}", layer.name);
        }
    }
}
