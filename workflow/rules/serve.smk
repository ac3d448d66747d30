# The persistent inference server with its lease, and its end when nothing needs it any more.
rule serve:
    input:
        RUN.preflight / "accepted.json",
        assets=RUN.assets / "assets.json",
        config=ancient(RUN.config),
    output:
        RUN.endpoint(SERVER),
    params:
        section=section("serve", "model"),
        out=RUN.serve(SERVER),
    log:
        LOGS / "serve.log",
    conda:
        "../envs/shakedown.yaml"
    localrule: True
    shell:
        "shakedown serve start --config {input.config} --assets {input.assets} "
        "--out {params.out} 2>&1 | tee {log}"


rule release_server:
    input:
        RUN.agents / "accepted.json",
        RUN.consistency / "accepted.json",
    output:
        touch(RUN.serve(SERVER) / "released.json"),
    params:
        command=stop_server_command(),
    log:
        LOGS / "release_server.log",
    conda:
        "../envs/shakedown.yaml"
    localrule: True
    shell:
        "{params.command} 2>&1 | tee {log}"
