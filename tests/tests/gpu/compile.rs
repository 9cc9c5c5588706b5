//! The kernels' source, for all architectures. Needs the compiler (NVRTC), no device.

use hsdp_kernels::cuda::{Architecture, compile};

#[test]
#[ignore = "needs NVRTC"]
fn every_kernel_compiles_for_every_architecture_without_local_memory() {
    for architecture in [80, 90, 100].map(Architecture) {
        let ptx = compile(architecture).expect("it compiles");
        let kernels = ptx.matches(".entry").count();
        assert_eq!(kernels, 28, "{architecture}: kernels");
        let written: Vec<&str> = ptx.split(".entry ").skip(1).collect();
        for kernel in written.iter().filter(|kernel| !kernel.starts_with("inspect")) {
            let name = kernel.split('(').next().unwrap_or_default();
            assert!(kernel.contains("ld.global.v"), "{architecture}: {name} reads word by word");
            assert!(kernel.contains("st.global.v"), "{architecture}: {name} writes word by word");
        }
        assert!(ptx.contains(".target sm_"), "{architecture}: {ptx:.200}");
        assert!(
            !ptx.contains(".local"),
            "{architecture}: an array of a kernel is not in registers"
        );
        assert!(!ptx.contains("fma."), "{architecture}: a product and a sum are rounded once");
    }
}
