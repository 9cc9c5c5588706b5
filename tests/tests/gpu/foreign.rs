//! Memory and streams of another library: here, of this test.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Packed, Stream, Together};
use hsdp_kernels::{Divisor, Values};
use hsdp_sharding::DType;

use super::numbers::ordinary;
use super::{assert_same, device, download, stream, upload};

/// Counts the tensors that are gone.
struct Tensor(Arc<AtomicUsize>);

impl Drop for Tensor {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A buffer of what lies in `memory`, which a library uses on `library`.
fn lent(library: &Arc<Stream>, memory: &DeviceBuffer, gone: &Arc<AtomicUsize>) -> DeviceBuffer {
    let owner = Box::new(Tensor(Arc::clone(gone)));
    let dtype = memory.dtype();
    let len = memory.len();
    let address = memory.address(0);
    // SAFETY: CU-7, the memory outlives all that is made of it in this file.
    let lent = unsafe { DeviceBuffer::foreign(library, dtype, len, address, owner) };
    lent.expect("a moment")
}

/// The library writes, lends, and writes again as soon as it has its memory back.
#[test]
#[ignore = "needs a CUDA device"]
fn memory_of_others_is_read_before_they_have_it_again() {
    let library = Arc::new(stream());
    let ours = stream();
    let len = 30_000;
    let memory = upload(&library, Values::F32(&vec![0.0; len]));
    library.moment().expect("a moment").wait("a test", super::PATIENCE).expect("done");
    let gone = Arc::new(AtomicUsize::new(0));
    for round in 0..40 {
        let values = ordinary(round, len);
        lent(&library, &memory, &gone).write(&library, Values::F32(&values)).expect("written");
        let gradient = lent(&library, &memory, &gone);
        let mut wire = DeviceBuffer::new(&device(), DType::F32, len, "a test").expect("memory");
        let packed = [Packed { gradient: (&gradient).into(), start: 0 }];
        ours.pack(&mut wire, &packed, Divisor::ONE, None).expect("packed");
        drop(gradient);
        // Its own affair, of which nothing is known here: it must come behind the packing.
        lent(&library, &memory, &gone).fill(&library, 0xff).expect("filled");
        let found = download(&ours, &wire);
        assert_same(found.values(), Values::F32(&values), &format!("round {round}"));
    }
    assert_eq!(gone.load(Ordering::Relaxed), 3 * 40, "each tensor went with its buffer");
}

/// After the failure, the library that was called may still read and write the buffers.
#[test]
#[ignore = "needs a CUDA device"]
fn memory_of_a_call_that_failed_is_never_given_back() {
    let library = Arc::new(stream());
    let memory = upload(&library, Values::F32(&[1.0, 2.0, 3.0]));
    let call = |outcome: Result<(), CudaError>| {
        let ours = stream();
        let gone = Arc::new(AtomicUsize::new(0));
        let read = lent(&library, &memory, &gone);
        let mut written = lent(&library, &memory, &gone);
        let reads = vec![&read];
        let mut parts = [Together { stream: &ours, reads, writes: vec![&mut written] }];
        assert_eq!(Stream::enqueue_together(&mut parts, |_| outcome.clone()), outcome);
        drop([read, written]);
        gone.load(Ordering::Relaxed)
    };
    assert_eq!(call(Ok(())), 2);
    let problem = "a failure on purpose".to_owned();
    assert_eq!(call(Err(CudaError::Mismatch { operation: "a test", problem })), 0);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_stream_of_others_is_left_to_them() {
    let library = stream();
    let memory = upload(&library, Values::F32(&[1.0, 2.0, 3.0]));
    let mut raw = None;
    library
        .enqueue::<CudaError>(&[], &mut [], |handle| {
            raw = Some(handle);
            Ok(())
        })
        .expect("nothing to refuse");
    // SAFETY: CU-7, `library` outlives it.
    let same = unsafe { Stream::foreign(&device(), raw.expect("it was called")) };
    assert_eq!(download(&same, &memory).values().to_f32(), [1.0, 2.0, 3.0]);
    drop(same);
    assert_eq!(download(&library, &memory).values().to_f32(), [1.0, 2.0, 3.0]);
}
