// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One loss from Rust: declarations of the C interface by hand, a safe call on slices, and a check of it. Build with
// scripts/test_rust.sh, or: rustc -O opd.rs -L <folder of libopd.so> -l opd
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::null;

#[repr(C)]
#[derive(Clone, Copy)]
struct DLDevice {
    device_type: c_int,
    device_id: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}
#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

// The first members of the library's structs: what a shorter struct lacks is 0, by struct_size.
#[repr(C)]
struct Student {
    struct_size: usize,
    kind: i32,
    keep_padding: i32,
    z: *const DLTensor,
    dz: *const DLTensor,
    padding: i64,
    temperature: f64,
}
#[repr(C)]
struct Teacher {
    struct_size: usize,
    kind: i32,
    law: i32,
    y: *const DLTensor,
    temperature: f64,
}
#[repr(C)]
struct Estimator {
    struct_size: usize,
    estimator: *const c_char,
    of: *const c_char,
    a: f64,
    b: f64,
}
#[repr(C)]
struct Outcome {
    struct_size: usize,
    loss: f64,
}
#[repr(C)]
struct Call {
    struct_size: usize,
    engine: *mut c_void,
    student: *const Student,
    teacher: *const Teacher,
    estimator: *const Estimator,
    env: *const c_void,
}
extern "C" {
    fn opd_evaluate(call: *const Call, result: *mut Outcome) -> c_int;
    fn opd_last_error() -> *const c_char;
}

/// Mean loss over `rows` rows of a divergence of the library's table, with its parameters; the gradient goes to dz.
pub fn divergence(
    z: &[f32],
    y: &[f32],
    dz: &mut [f32],
    rows: usize,
    of: &str,
    a: f64,
    b: f64,
) -> Result<f64, String> {
    if rows == 0 || z.len() % rows != 0 || y.len() != z.len() || dz.len() != z.len() {
        return Err("z, y and dz are of rows x vocabulary numbers each".to_string());
    }
    let mut shape = [rows as i64, (z.len() / rows) as i64];
    let shape_at = shape.as_mut_ptr();
    let tensor = |data: *const f32| DLTensor {
        data: data as *mut c_void,
        device: DLDevice { device_type: 1, device_id: 0 },
        ndim: 2,
        dtype: DLDataType { code: 2, bits: 32, lanes: 1 },
        shape: shape_at,
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let (z, y, dz) = (tensor(z.as_ptr()), tensor(y.as_ptr()), tensor(dz.as_mut_ptr()));
    let name = CString::new(of).map_err(|e| e.to_string())?;
    let student = Student {
        struct_size: std::mem::size_of::<Student>(),
        kind: 0,
        keep_padding: 0,
        z: &z,
        dz: &dz,
        padding: 0,
        temperature: 1.0,
    };
    let teacher =
        Teacher { struct_size: std::mem::size_of::<Teacher>(), kind: 0, law: 0, y: &y, temperature: 1.0 };
    let estimator =
        Estimator { struct_size: std::mem::size_of::<Estimator>(), estimator: null(), of: name.as_ptr(), a, b };
    let call = Call {
        struct_size: std::mem::size_of::<Call>(),
        engine: std::ptr::null_mut(),
        student: &student,
        teacher: &teacher,
        estimator: &estimator,
        env: null(),
    };
    let mut outcome = Outcome { struct_size: std::mem::size_of::<Outcome>(), loss: 0.0 };
    // SAFETY: the structs are those of opd/c/evaluate.h up to their last member here, and all they point to outlives
    // the call.
    let status = unsafe { opd_evaluate(&call, &mut outcome) };
    if status != 0 {
        // SAFETY: the library's text is good until this thread's next call.
        return Err(unsafe { CStr::from_ptr(opd_last_error()) }.to_string_lossy().into_owned());
    }
    Ok(outcome.loss)
}

fn main() {
    let (z, y) = ([0.0f32, 0.0], [3.0f32.ln(), 0.0]);
    let mut dz = [0.0f32; 2];
    let loss = divergence(&z, &y, &mut dz, 1, "reverse_kl", 0.0, 0.0).expect("a loss");
    println!("loss {loss:.6} gradient {:.6} {:.6}", dz[0], dz[1]);
    assert!((loss - 0.143841).abs() < 1e-6 && (dz[1] - 0.274653).abs() < 1e-6);
    let refused = divergence(&z, &y, &mut dz, 1, "reverse", 0.0, 0.0).unwrap_err();
    assert!(refused.contains("estimator.of"), "{refused}");
    println!("refused as it should be: {refused}");
}
