# The resolved config beside the results, and the demo's model and data.
rule resolve_config:
    output:
        RUN.config,
    log:
        LOGS / "config.log",
    localrule: True
    params:
        config=section(*CONFIG.model_dump()),
    run:
        write_resolved(CONFIG, Path(output[0]))


rule assets:
    input:
        ancient(RUN.config),
    output:
        RUN.assets / "assets.json",
    log:
        LOGS / "assets.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    params:
        section=section("model", "data", "seed"),
    shell:
        "shakedown assets --config {input} --out $(dirname {output}) 2>&1 | tee {log}"
